// Fixed-width bit packing: n-bit fields, least significant bit first, no gaps. Codes 5, 2, 7 at 3 bits are 5 | 2 << 3 |
// 7 << 6 = 0x1d5, the bytes d5 01.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

inline size_t packed_size(size_t count, unsigned bits) { return (count * bits + 7) / 8; }

// `out` must hold packed_size(count, bits) bytes. `bits` is 1 to 32; higher bits of a code are ignored.
void pack_bits(const uint32_t* codes, size_t count, unsigned bits, uint8_t* out);
// `data` must hold packed_size(count, bits) bytes.
void unpack_bits(const uint8_t* data, size_t count, unsigned bits, uint32_t* out);

}  // namespace shrinkpoint
