// Steps, dithers and scratch memory of a tile of lattice positions, and the values of codes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "base/bits.hpp"
#include "base/floats.hpp"
#include "base/parallel.hpp"
#include "base/simd.hpp"
#include "entropy/predict.hpp"
#include "entropy/tiles.hpp"
#include "lattice/codes.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

constexpr int32_t kMaxCode = (1 << 15) - 2;
constexpr int16_t kZeroCode = -127;      // code of zero on a lattice of powers
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers, half to even
constexpr uint32_t kRounderBits = 0x4b400000;

// Rounds half to even, for |value| < 2^22.
SHRINKPOINT_INLINE int32_t rounded(float value) {
    return static_cast<int32_t>(bits_of(value + kRounder) - kRounderBits);
}

// Selects without a branch, so that loops become vectors.
SHRINKPOINT_INLINE int32_t chosen(bool first, int32_t a, int32_t b) {
    const int32_t mask = -static_cast<int32_t>(first);
    return (a & mask) | (b & ~mask);
}

// The value, or 0. By its bits: compilers make many branches of a condition that meets other ones.
SHRINKPOINT_INLINE float held(bool is_held, float value) {
    return float_of(bits_of(value) & (0u - static_cast<uint32_t>(is_held)));
}

// Maps values that are not finite to 0 and limits the rest to the range of codes. By their bits, too.
SHRINKPOINT_INLINE float reachable(float position) {
    constexpr int32_t kMaxCodeBits = 0x46fffc00, kInfinity = 0x7f800000;  // of the float kMaxCode
    const uint32_t bits = bits_of(position);
    const auto magnitude = static_cast<int32_t>(bits & 0x7fffffff);
    const auto limited = static_cast<uint32_t>(std::min(magnitude, kMaxCodeBits)) | (bits & 0x80000000);
    return held(magnitude < kInfinity, float_of(limited));
}

// The steps and contexts of the positions of one tile, and scratch memory.
struct alignas(64) Cells {
    float steps[kTile];
    float dithers[kTile];      // zeros at first, and again for a lattice without a seed
    bool is_dithered = false;  // false if all dithers are zeros
    float parent[kTile];
    float values[kTile];
    int32_t exponents[kTile];
    int16_t short_exponents[kTile];
    uint8_t classes[kTile];
    int16_t guesses[kTile];
    int16_t codes[kTile];
    int16_t origins[kTile];
};

// Same as fill_cells, with steps relative to the roots of second moments.
void fill_relative_cells(const Lattice& lattice, const CodedMoments& seconds, uint64_t start, size_t count,
                         Cells& cells);

// Fills exponents or dithers of `count` positions from `start` on: all that a guess without a parent needs.
void fill_offsets(const Lattice& lattice, uint64_t start, size_t count, Cells& cells);

// Fills steps or exponents, and dithers, of `count` positions from `start` on. `roots` are the roots of their second
// moments, or null.
void fill_cells(const Lattice& lattice, const float* roots, uint64_t start, size_t count, Cells& cells);

// Computes the roots of second moments from their codes on a lattice of powers. `cells` is scratch memory.
void roots_of_codes(const Lattice& seconds, Codes codes, uint64_t first, uint64_t start, size_t count, Cells& cells,
                    float* roots);

// Decodes the codes of `count` positions from `start` on.
void values_of_codes(const Lattice& lattice, const int16_t* codes, uint64_t start, size_t count, Cells& cells,
                     float* values);

}  // namespace shrinkpoint
