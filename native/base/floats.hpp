// Reads float32 arrays in place and widens bfloat16 arrays tile by tile.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// A borrowed array of float32 (4 bytes) or bfloat16 (2 bytes); null if there is none.
struct Floats {
    const uint8_t* data = nullptr;
    unsigned bytes = 4;
};

void widen_bfloat16(const uint16_t* values, size_t count, float* out);

// Fetches the block behind one that is about to be read: blocks are over before the machine sees the next one coming.
inline void fetch_next(const uint8_t* block, size_t size) {
    for (size_t ahead = 0; ahead < size; ahead += 64) __builtin_prefetch(block + size + ahead);
}

// Returns `count` floats from `start` on, in place or widened into `buffer`.
inline const float* read_floats(Floats array, uint64_t start, size_t count, float* buffer) {
    fetch_next(array.data + array.bytes * start, array.bytes * count);
    if (array.bytes == 4) return reinterpret_cast<const float*>(array.data) + start;
    widen_bfloat16(reinterpret_cast<const uint16_t*>(array.data) + start, count, buffer);
    return buffer;
}

}  // namespace shrinkpoint
