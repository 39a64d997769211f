// Integer types and bit-pattern functions that the token kernels share.
#pragma once
#include <cstdint>
#include <type_traits>

#include "base/simd.hpp"

namespace shrinkpoint {

template <typename U>
constexpr unsigned width_of = 8 * sizeof(U);

// The type of a value's extra bits: 32 bits where these are enough, for twice the lanes.
template <typename U>
using Extra = std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t>;

template <typename U>
constexpr U magnitude_mask = static_cast<U>(static_cast<U>(~U{0}) >> 1);

inline int32_t clamp_int(int32_t x, int32_t low, int32_t high) { return x < low ? low : (x > high ? high : x); }

// Class of Adam's step size: log2(|m| / sqrt(v)) in half octaves, 0 to 15. From the bit patterns alone, so the same on
// every machine.
SHRINKPOINT_INLINE int32_t adam_ratio_class(uint32_t m, uint32_t v) {
    const int32_t ratio = static_cast<int32_t>((m & 0x7fffffffu) >> 22) -
                          static_cast<int32_t>(((v & 0x7fffffffu) >> 23) + 127);
    return clamp_int(ratio + 10, 0, 15);
}

}  // namespace shrinkpoint
