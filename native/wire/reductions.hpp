// Functions for kernels of messages of groups: sums in one order, the largest magnitude, rounding.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bits.hpp"
#include "base/simd.hpp"

namespace shrinkpoint {

// Rounds a positive number to the nearest bfloat16, half to even.
SHRINKPOINT_INLINE float nearest_brief(float x) {
    const uint32_t word = bits_of(x);
    return float_of((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000);
}

// Sums 16 values by adding halves, in vectors if there are any: compilers take such loops apart.
SHRINKPOINT_INLINE float halved_lanes(const float* x) {
#if defined(__GNUC__)
    using Four = float __attribute__((vector_size(16)));
    Four parts[4];
    std::memcpy(parts, x, sizeof parts);
    const Four four = (parts[0] + parts[2]) + (parts[1] + parts[3]);
#else
    float eight[8], four[4];
    for (int j = 0; j < 8; ++j) eight[j] = x[j] + x[j + 8];
    for (int j = 0; j < 4; ++j) four[j] = eight[j] + eight[j + 4];
#endif
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// Sums a power of two of values, 16 or more, by adding halves until one is left. Overwrites them. The order is the same
// for every instruction set and for torch: (x0 + x2) + (x1 + x3) for the last four.
SHRINKPOINT_INLINE float halved(float* x, size_t count) {
    constexpr size_t lanes = 16;
    for (size_t half = count / 2; half >= lanes; half /= 2)
        for (size_t i = 0; i < half; i += lanes) {
            float sums[lanes];
            for (size_t j = 0; j < lanes; ++j) sums[j] = x[i + j] + x[half + i + j];
            std::memcpy(x + i, sums, sizeof sums);
        }
    return halved_lanes(x);
}

// The largest magnitude as bits. Bits of finite magnitudes have the order of the numbers.
SHRINKPOINT_INLINE uint32_t largest(const float* x, size_t count) {
    int32_t most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, static_cast<int32_t>(bits_of(x[i]) & 0x7FFFFFFF));
    return static_cast<uint32_t>(most);
}

// Returns `count` values padded with zeros to whole units: in place, or a copy.
SHRINKPOINT_INLINE const float* filled_up(const float* values, size_t count, size_t unit, float* copy) {
    if (count % unit == 0) return values;
    std::memcpy(copy, values, 4 * count);
    std::fill(copy + count, copy + (count + unit - 1) / unit * unit, 0.0f);
    return copy;
}

}  // namespace shrinkpoint
