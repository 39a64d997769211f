#include "wire/steps.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bits.hpp"
#include "base/simd.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kSumBlock = 1 << 14;  // so many codes that 32 bits hold their sums
// Added to a float of at most 2^22, it leaves the number rounded half to even in the low bits. A conversion to whole
// numbers cuts off, and `nearbyint` is a call for each value without SSE 4.1.
constexpr float kRounder = 12582912.0f;

}  // namespace

SHRINKPOINT_KERNEL(void, step_roots, (float* moments, size_t count, float least), (moments, count, least)) {
    for (size_t i = 0; i < count; ++i) {
        const float root = std::sqrt(moments[i]);
        moments[i] = root >= least && root < std::numeric_limits<float>::infinity() ? root : least;
    }
}

SHRINKPOINT_KERNEL(StepSums, step_round,
                   (const float* values, const float* roots, float inverse, size_t count, uint8_t* codes),
                   (values, roots, inverse, count, codes)) {
    constexpr auto limit = static_cast<float>(kStepEscape);
    StepSums sums;
    for (size_t start = 0; start < count; start += kSumBlock) {
        const size_t end = std::min(count, start + kSumBlock);
        int32_t magnitudes = 0, escapes = 0;
        for (size_t i = start; i < end; ++i) {
            const float multiple = values[i] / roots[i] * inverse;
            const float low = multiple < limit ? multiple : limit;  // a nan becomes the limit
            const float near = low > -limit ? low : -limit;
            const auto code = static_cast<int32_t>(bits_of(near + kRounder) - bits_of(kRounder));
            const int32_t magnitude = code < 0 ? -code : code;
            magnitudes += std::min(magnitude, kMaxStepLevel);
            escapes += magnitude == kStepEscape;
            codes[i] = static_cast<uint8_t>(code + kStepOffset);
        }
        sums.magnitudes += static_cast<uint32_t>(magnitudes);
        sums.escapes += static_cast<uint32_t>(escapes);
    }
    return sums;
}

SHRINKPOINT_KERNEL(void, step_multiply,
                   (const uint8_t* codes, const float* roots, float factor, size_t count, float* values),
                   (codes, roots, factor, count, values)) {
    for (size_t i = 0; i < count; ++i)
        values[i] = static_cast<float>(static_cast<int32_t>(codes[i]) - kStepOffset) * factor * roots[i];
}

}  // namespace shrinkpoint
