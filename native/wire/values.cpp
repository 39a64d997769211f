#include "wire/values.hpp"

#include <algorithm>

#include "base/bits.hpp"
#include "base/simd.hpp"
#include "wire/reductions.hpp"

namespace shrinkpoint {

namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kBriefNan = 0x7FC0;
constexpr size_t kCountBlock = 1 << 14;
constexpr int32_t kInfiniteBits = 0x7F800000, kMostBrief = 0x7F7F0000;

// All bits set if `number` is above `limit`, else 0. Neither is negative. Compilers make no branch of it.
SHRINKPOINT_INLINE uint32_t above(int32_t number, int32_t limit) {
    return static_cast<uint32_t>((limit - number) >> 31);
}

}  // namespace

SHRINKPOINT_KERNEL(void, round_to_brief, (const float* from, size_t count, uint16_t* to), (from, count, to)) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t word = bits_of(from[i]);
        const auto magnitude = static_cast<int32_t>(word & kMagnitude);
        const uint32_t nan = above(magnitude, kInfiniteBits), special = above(magnitude, kInfiniteBits - 1);
        const auto finite = static_cast<uint32_t>(std::min(magnitude, kMostBrief));
        const uint32_t rounded = (finite + 0x7FFF + (finite >> 16 & 1)) >> 16;
        const uint32_t brief = (rounded & ~special) | ((word >> 16 & 0x7FFF) & special & ~nan) | (kBriefNan & nan);
        to[i] = static_cast<uint16_t>(brief | (word >> 31 << 15));
    }
}

SHRINKPOINT_KERNEL(size_t, count_masked32, (const uint32_t* values, size_t count, uint32_t mask), (values, count, mask)) {
    size_t total = 0;
    for (size_t start = 0; start < count; start += kCountBlock) {  // counters as wide as the values
        uint32_t found = 0;
        const size_t end = std::min(count, start + kCountBlock);
        for (size_t i = start; i < end; ++i) found += (values[i] & mask) == mask;
        total += found;
    }
    return total;
}

SHRINKPOINT_KERNEL(size_t, count_masked16, (const uint16_t* values, size_t count, uint16_t mask), (values, count, mask)) {
    size_t total = 0;
    for (size_t start = 0; start < count; start += kCountBlock) {
        uint16_t found = 0;
        const size_t end = std::min(count, start + kCountBlock);
        for (size_t i = start; i < end; ++i) found = static_cast<uint16_t>(found + ((values[i] & mask) == mask));
        total += found;
    }
    return total;
}

}  // namespace shrinkpoint
