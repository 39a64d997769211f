// Byte planes: byte 0 of every value, then byte 1 of every value, ...
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// Both buffers hold count * bytes bytes. `bytes` is 1 to 8.
void split_planes(const uint8_t* values, size_t count, unsigned bytes, uint8_t* planes);
void join_planes(const uint8_t* planes, size_t count, unsigned bytes, uint8_t* values);

}  // namespace shrinkpoint
