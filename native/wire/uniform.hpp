// Values on uniform grids, one for each run of them, and codes as planes of bits: messages of
// comm/compressors/quantizers.py and layout.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"
#include "wire/values.hpp"

namespace shrinkpoint {

constexpr size_t kWireTile = 64;  // codes that are packed together

inline size_t wire_tiles(size_t count) { return (count + kWireTile - 1) / kWireTile; }
inline size_t wire_plane_bytes(size_t count, unsigned bits) { return wire_tiles(count) * (kWireTile / 8) * bits; }

constexpr uint64_t kLowBits = 0x0101010101010101;  // of the bytes of a word

// One plane of one tile, and back: byte j holds the codes j, j + 8 width, ... from its low bits up. Eight bytes are one
// word: what a shift brings over from the next byte is masked.
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

// `tiles` tiles of codes, the first of them being tile `first` of `all` of a message whose planes start at `planes`.
// To be called from kernels: it is compiled for the instruction set of the caller.
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

// All codes of a message; `planes` has wire_plane_bytes(count, bits) bytes. bits is 1..8.
void pack_planes(const uint8_t* codes, size_t count, unsigned bits, uint8_t* planes);
void unpack_planes(const uint8_t* planes, size_t count, unsigned bits, uint8_t* codes);

struct UniformWire {
    size_t count;   // values
    size_t size;    // of a run; at least 1
    unsigned bits;  // of a code: 1..8
    bool brief;     // whether ranges are bfloat16, else float32
    bool dithered;
    uint32_t seed;  // of the dither

    size_t runs() const { return count / size + (count % size != 0); }
    size_t head() const { return runs() * (brief ? 4 : 8); }
    size_t bytes() const { return head() + wire_plane_bytes(count, bits); }
};

// `wire` has how.bytes() bytes, of any alignment.
void uniform_encode(const UniformWire& layout, const WireSource& values, uint8_t* wire, unsigned threads);
void uniform_decode(const UniformWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads);

}  // namespace shrinkpoint
