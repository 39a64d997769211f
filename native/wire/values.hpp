// Gives kernels of messages the values of a tensor and takes them back: float32 in place, or bfloat16, which is widened
// and rounded in pieces that stay in the first caches.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.hpp"
#include "base/floats.hpp"

namespace shrinkpoint {

// Rounds to the nearest bfloat16, half to even. Finite numbers stay finite: those out of range become the largest
// bfloat16.
void round_to_brief(const float* from, size_t count, uint16_t* to);
// Counts the values that are nan or infinite: all bits of the mask, an exponent's, are set.
size_t count_masked32(const uint32_t* values, size_t count, uint32_t mask);
size_t count_masked16(const uint16_t* values, size_t count, uint16_t mask);

using FloatPiece = std::vector<float, UninitializedAllocator<float>>;

class WireSource {
   public:
    WireSource(const float* data) : data_(data), brief_(false) {}  // NOLINT: floats are a source as they are
    WireSource(const void* data, bool brief) : data_(data), brief_(brief) {}
    bool brief() const { return brief_; }

    // Returns `count` values from `first` on, in place or in `buffer`, which has room for them.
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

    // Returns where to write values from `first` on: in place, or into `buffer`, from which `put` takes them.
    float* piece(size_t first, float* buffer) const { return brief_ ? buffer : static_cast<float*>(data_) + first; }
    void put(size_t first, size_t count, const float* buffer) const {
        if (brief_) round_to_brief(buffer, count, static_cast<uint16_t*>(data_) + first);
    }

   private:
    void* data_;
    bool brief_;
};

}  // namespace shrinkpoint
