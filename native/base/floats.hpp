// Floats of 32 bits, or bfloat16, which are widened tile by tile.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// A borrowed array of floats of 4 bytes or, with 2, of bfloat16; null for none.
struct Floats {
    const uint8_t* data = nullptr;
    unsigned bytes = 4;
};

void widen_bfloat16(const uint16_t* values, size_t count, float* out);

// `count` floats from `start` on: where they lie, or widened into `buffer`.
inline const float* read_floats(Floats array, uint64_t start, size_t count, float* buffer) {
    if (array.bytes == 4) return reinterpret_cast<const float*>(array.data) + start;
    widen_bfloat16(reinterpret_cast<const uint16_t*>(array.data) + start, count, buffer);
    return buffer;
}

}  // namespace shrinkpoint
