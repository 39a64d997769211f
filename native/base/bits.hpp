// Converts a float to its bit pattern and back. Inlined into kernels, so compiled for their instruction set.
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
