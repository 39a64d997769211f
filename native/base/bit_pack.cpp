#include "base/bit_pack.hpp"

namespace shrinkpoint {

void pack_bits(const uint32_t* codes, size_t count, unsigned bits, uint8_t* out) {
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    uint64_t buffer = 0;
    unsigned filled = 0;
    for (size_t i = 0; i < count; ++i) {
        buffer |= (codes[i] & mask) << filled;
        filled += bits;
        for (; filled >= 8; filled -= 8, buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
    }
    if (filled > 0) *out = static_cast<uint8_t>(buffer);
}

void unpack_bits(const uint8_t* data, size_t count, unsigned bits, uint32_t* out) {
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    uint64_t buffer = 0;
    unsigned filled = 0;
    for (size_t i = 0; i < count; ++i) {
        for (; filled < bits; filled += 8) buffer |= static_cast<uint64_t>(*data++) << filled;
        out[i] = static_cast<uint32_t>(buffer & mask);
        buffer >>= bits;
        filled -= bits;
    }
}

}  // namespace shrinkpoint
