#include "floats.hpp"

#include <cstring>

#include "simd.hpp"

namespace shrinkpoint {

SHRINKPOINT_KERNEL(void, widen_bfloat16, (const uint16_t* values, size_t count, float* out), (values, count, out)) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = static_cast<uint32_t>(values[i]) << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

}  // namespace shrinkpoint
