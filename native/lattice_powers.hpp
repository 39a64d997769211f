// Values of codes on a lattice of powers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// values[i] = 2^((exponents[i] + step * codes[i]) / 8), or 0 for the code of zero.
void make_powers(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* values);

}  // namespace shrinkpoint
