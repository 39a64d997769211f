// Codes of lattice points: integers of one byte, which are widened tile by tile, or of two.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/floats.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

void widen_codes(const int8_t* codes, size_t count, int16_t* out);

// Returns true if all codes fit.
bool narrow_codes(const int16_t* codes, size_t count, int8_t* out);

// Returns `count` codes from `start` on, in place or widened into `buffer`.
inline const int16_t* read_codes(Codes codes, uint64_t start, size_t count, int16_t* buffer) {
    const uint8_t* const data = codes.data + codes.bytes * start;
    fetch_next(data, codes.bytes * count);
    if (codes.bytes == 2) return reinterpret_cast<const int16_t*>(data);
    widen_codes(reinterpret_cast<const int8_t*>(codes.data) + start, count, buffer);
    return buffer;
}

// Second moments as a reader decodes them: codes on a lattice of powers.
struct CodedMoments {
    const Lattice* lattice = nullptr;
    Codes codes;
};

}  // namespace shrinkpoint
