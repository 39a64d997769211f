// Groups of values on the levels of a normal distribution, blocks of small floats, and rotations: what
// comm/compressors/quantizers.py and hadamard.py do, and the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "wire/uniform.hpp"

namespace shrinkpoint {

constexpr size_t kLeastGroup = 16, kMaxGroup = 4096;  // powers of two

inline bool is_group(size_t size) { return size >= kLeastGroup && size <= kMaxGroup && (size & (size - 1)) == 0; }

struct NormalWire {
    size_t count;          // values
    size_t group;          // of a scale
    unsigned bits;         // of a code: 1..4
    const float* centers;  // 2^(bits - 1), ascending

    size_t groups() const { return (count + group - 1) / group; }
    size_t head() const { return 2 * groups(); }
    size_t bytes() const { return head() + wire_plane_bytes(count, bits); }
};

// `wire` has how.bytes() bytes, of any alignment.
void normal_encode(const NormalWire& layout, const WireSource& values, uint8_t* wire, unsigned threads);
void normal_decode(const NormalWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads);

struct BlockWire {
    size_t count;   // values
    size_t block;   // of an exponent
    unsigned bits;  // of a mantissa with its sign: 2..8

    size_t head() const { return (count + block - 1) / block; }
    size_t bytes() const { return head() + wire_plane_bytes(count, bits); }
};

// `wire` has how.bytes() bytes.
void blockfloat_encode(const BlockWire& layout, const WireSource& values, uint8_t* wire, unsigned threads);
void blockfloat_decode(const BlockWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads);

struct Rotation {
    size_t count;        // values; the last block is filled up with zeros
    size_t block;        // 16, 64 or 256
    const float* signs;  // `block` of them
    float limit;         // turn what has a magnitude above so many times the sum of all; only where there are flags

    size_t blocks() const { return (count + block - 1) / block; }
};

// `turned` has how.blocks() * how.block values. `flags`, if any: a byte for each block, whether it is turned.
void rotate(const Rotation& layout, const WireSource& values, float* turned, uint8_t* flags, unsigned threads);
void rotate_back(const Rotation& layout, const float* turned, const uint8_t* flags, const WireTarget& values,
                 unsigned threads);

}  // namespace shrinkpoint
