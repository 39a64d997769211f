// Decodes codes on a lattice of powers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// Sets values[i] = 2^((exponents[i] + step * codes[i]) / 8), or 0 for the code of zero.
void make_powers(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* values);

// Sets the square roots of the same values, each rounded once.
void make_power_roots(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* roots);

// Computes square roots; `roots` may be the same array as `squares`.
void take_roots(const float* squares, size_t count, float* roots);

}  // namespace shrinkpoint
