#include "base/floats.hpp"

#include "base/bits.hpp"
#include "base/simd.hpp"

namespace shrinkpoint {

SHRINKPOINT_KERNEL(void, widen_bfloat16, (const uint16_t* values, size_t count, float* out), (values, count, out)) {
    for (size_t i = 0; i < count; ++i) out[i] = float_of(uint32_t{values[i]} << 16);
}

}  // namespace shrinkpoint
