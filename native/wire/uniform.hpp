// Values on a uniform grid for each run of them, and codes as planes of bits: messages of
// comm/compressors/quantizers.py and layout.py.
//
// Example: one run of 4 values 0, 0.25, 0.5, 1 with 2 bits. The lowest value is 0; the step (1 - 0) / 3 is rounded away
// from zero to the bfloat16 0.333984375 = 0x3eab. The codes are floor(value / step + 0.5) = 0, 1, 1, 3 and decode to 0,
// 0.33398438, 0.33398438, 1.0019531. The message is 00 00 (lowest), ab 3e (step), then one tile of the plane of 2 bits:
// 00 01 01 03 and 12 zero bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"
#include "wire/values.hpp"

namespace shrinkpoint {

constexpr size_t kWireTile = 64;  // codes packed together

inline size_t wire_tiles(size_t count) { return (count + kWireTile - 1) / kWireTile; }
inline size_t wire_plane_bytes(size_t count, unsigned bits) { return wire_tiles(count) * (kWireTile / 8) * bits; }

constexpr uint64_t kLowBits = 0x0101010101010101;  // lowest bit of each byte

// Packs one plane of a tile of 64 codes, and back. Byte j holds the codes j, j + 8 width, j + 16 width, ... from its
// low bits up. Eight bytes are handled as one word: bits that a shift brings over from the next byte are masked.
//
// Example: codes 0, 16, 32 and 48 of a tile are 5, 2, 7 and 1, the others 0, with 3 bits. The plane of the low 2 bits
// has 1 | 2 << 2 | 3 << 4 | 1 << 6 = 0x79 in byte 0. The plane of the third bit has codes 0, 8, 16, ... 56 in byte 0:
// bit 0 for code 0 and bit 4 for code 32, 0x11.
template <unsigned width>
SHRINKPOINT_INLINE void pack_plane(const uint8_t* codes, unsigned shift, uint8_t* out) {
    constexpr uint64_t mask = kLowBits * ((1u << width) - 1);
    uint64_t packed[width] = {};
    for (unsigned i = 0; i < 8 / width; ++i) {
        uint64_t words[width];
        std::memcpy(words, codes + 8 * width * i, sizeof words);
        for (unsigned j = 0; j < width; ++j) packed[j] |= (words[j] >> shift & mask) << (width * i);
    }
    std::memcpy(out, packed, sizeof packed);
}

template <unsigned width>
SHRINKPOINT_INLINE void unpack_plane(const uint8_t* data, unsigned shift, uint8_t* codes) {
    constexpr uint64_t mask = kLowBits * ((1u << width) - 1);
    uint64_t packed[width];
    std::memcpy(packed, data, sizeof packed);
    for (unsigned i = 0; i < 8 / width; ++i) {
        uint64_t words[width] = {};
        if (shift != 0) std::memcpy(words, codes + 8 * width * i, sizeof words);
        for (unsigned j = 0; j < width; ++j) words[j] |= (packed[j] >> (width * i) & mask) << shift;
        std::memcpy(codes + 8 * width * i, words, sizeof words);
    }
}

template <unsigned width>
SHRINKPOINT_INLINE void pack_plane_of_tiles(const uint8_t* codes, size_t tiles, unsigned shift, uint8_t* out) {
    for (size_t t = 0; t < tiles; ++t) pack_plane<width>(codes + t * kWireTile, shift, out + t * 8 * width);
}

template <unsigned width>
SHRINKPOINT_INLINE void unpack_plane_of_tiles(const uint8_t* data, unsigned shift, uint8_t* codes, size_t tiles) {
    for (size_t t = 0; t < tiles; ++t) unpack_plane<width>(data + t * 8 * width, shift, codes + t * kWireTile);
}

// Packs `tiles` tiles of codes. The first is tile `first` of `all` tiles of a message whose planes start at `planes`.
// For kernels: compiled for the caller's instruction set.
SHRINKPOINT_INLINE void pack_tiles(const uint8_t* codes, size_t tiles, unsigned bits, uint8_t* planes, size_t first,
                                   size_t all) {
    if (bits == 8) {
        std::memcpy(planes + first * kWireTile, codes, tiles * kWireTile);
        return;
    }
    if (bits & 4) pack_plane_of_tiles<4>(codes, tiles, 0, planes + first * 32);
    planes += (bits & 4) * 8 * all;
    if (bits & 2) pack_plane_of_tiles<2>(codes, tiles, bits & 4, planes + first * 16);
    planes += (bits & 2) * 8 * all;
    if (bits & 1) pack_plane_of_tiles<1>(codes, tiles, bits & 6, planes + first * 8);
}

SHRINKPOINT_INLINE void unpack_tiles(const uint8_t* planes, size_t first, size_t all, unsigned bits, uint8_t* codes,
                                     size_t tiles) {
    if (bits == 8) {
        std::memcpy(codes, planes + first * kWireTile, tiles * kWireTile);
        return;
    }
    if (bits & 4) unpack_plane_of_tiles<4>(planes + first * 32, 0, codes, tiles);
    planes += (bits & 4) * 8 * all;
    if (bits & 2) unpack_plane_of_tiles<2>(planes + first * 16, bits & 4, codes, tiles);
    planes += (bits & 2) * 8 * all;
    if (bits & 1) unpack_plane_of_tiles<1>(planes + first * 8, bits & 6, codes, tiles);
}

// Packs all codes of a message. `planes` has wire_plane_bytes(count, bits) bytes; `bits` is 1 to 8.
void pack_planes(const uint8_t* codes, size_t count, unsigned bits, uint8_t* planes);
void unpack_planes(const uint8_t* planes, size_t count, unsigned bits, uint8_t* codes);

struct UniformWire {
    size_t count;   // values
    size_t size;    // values of a run; at least 1
    unsigned bits;  // bits of a code: 1 to 8
    bool brief;     // true for bfloat16 ranges, false for float32
    bool dithered;
    uint32_t seed;  // seed of the dither

    size_t runs() const { return count / size + (count % size != 0); }
    size_t head() const { return runs() * (brief ? 4 : 8); }
    size_t bytes() const { return head() + wire_plane_bytes(count, bits); }
};

// `wire` has layout.bytes() bytes at any address.
void uniform_encode(const UniformWire& layout, const WireSource& values, uint8_t* wire, unsigned threads);
void uniform_decode(const UniformWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads);

}  // namespace shrinkpoint
