// The 32 bits of a float as a number, and back. An inline function of a kernel is compiled for the kernel's instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"

namespace shrinkpoint {

// bits_of(1.0f) = 0x3f800000
SHRINKPOINT_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

SHRINKPOINT_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace shrinkpoint
