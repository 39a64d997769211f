// The values of a tensor as kernels of messages take and give them: float32, which lies where it is, or bfloat16, which
// is widened and rounded by pieces that stay in the first caches.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.hpp"
#include "base/floats.hpp"

namespace shrinkpoint {

// To the nearest, halves to even; finite numbers stay finite: those beyond the range become the largest one.
void round_to_brief(const float* from, size_t count, uint16_t* to);
// How many values are nan or infinite: those whose bits contain all of the mask, that of an exponent.
size_t count_masked32(const uint32_t* values, size_t count, uint32_t mask);
size_t count_masked16(const uint16_t* values, size_t count, uint16_t mask);

using FloatPiece = std::vector<float, UninitializedAllocator<float>>;

class WireSource {
   public:
    WireSource(const float* data) : data_(data), brief_(false) {}  // NOLINT: floats are a source as they are
    WireSource(const void* data, bool brief) : data_(data), brief_(brief) {}
    bool brief() const { return brief_; }

    // `count` values from `first` on: where they lie, or in `buffer`, which holds as many.
    const float* piece(size_t first, size_t count, float* buffer) const {
        if (!brief_) return static_cast<const float*>(data_) + first;
        widen_bfloat16(static_cast<const uint16_t*>(data_) + first, count, buffer);
        return buffer;
    }

   private:
    const void* data_;
    bool brief_;
};

class WireTarget {
   public:
    WireTarget(float* data) : data_(data), brief_(false) {}  // NOLINT: floats are a target as they are
    WireTarget(void* data, bool brief) : data_(data), brief_(brief) {}

    // Where to write values from `first` on: their place, or `buffer`, from which `put` takes them.
    float* piece(size_t first, float* buffer) const { return brief_ ? buffer : static_cast<float*>(data_) + first; }
    void put(size_t first, size_t count, const float* buffer) const {
        if (brief_) round_to_brief(buffer, count, static_cast<uint16_t*>(data_) + first);
    }

   private:
    void* data_;
    bool brief_;
};

}  // namespace shrinkpoint
