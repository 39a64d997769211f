// Groups of values on the levels of a normal distribution, blocks of small floats, and rotations. Gives the bits of
// comm/compressors/quantizers.py and hadamard.py.
//
// Example of a block of small floats with 4 bits: the values 1.5, -0.25, 0.7 and 61 zeros. The largest magnitude has
// exponent 127, the first byte of the message. The step is 2^(127 - 127 - 2) = 0.25, and the codes are 6, -1, 3 and
// zeros, of which the low 4 bits are sent: 6, 15, 3. They decode to 1.5, -0.25 and 0.75.
#pragma once
#include <cstddef>
#include <cstdint>

#include "wire/uniform.hpp"

namespace shrinkpoint {

constexpr size_t kLeastGroup = 16, kMaxGroup = 4096;  // powers of two

inline bool is_group(size_t size) { return size >= kLeastGroup && size <= kMaxGroup && (size & (size - 1)) == 0; }

struct NormalWire {
    size_t count;          // values
    size_t group;          // values that share a scale
    unsigned bits;         // bits of a code: 1 to 4
    const float* centers;  // 2^(bits - 1), ascending

    size_t groups() const { return (count + group - 1) / group; }
    size_t head() const { return 2 * groups(); }
    size_t bytes() const { return head() + wire_plane_bytes(count, bits); }
};

// `wire` has layout.bytes() bytes at any address.
void normal_encode(const NormalWire& layout, const WireSource& values, uint8_t* wire, unsigned threads);
void normal_decode(const NormalWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads);

struct BlockWire {
    size_t count;   // values
    size_t block;   // values that share an exponent
    unsigned bits;  // bits of a mantissa with its sign: 2 to 8

    size_t head() const { return (count + block - 1) / block; }
    size_t bytes() const { return head() + wire_plane_bytes(count, bits); }
};

// `wire` has layout.bytes() bytes.
void blockfloat_encode(const BlockWire& layout, const WireSource& values, uint8_t* wire, unsigned threads);
void blockfloat_decode(const BlockWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads);

struct Rotation {
    size_t count;        // values; the last block is filled up with zeros
    size_t block;        // 16, 64 or 256
    const float* signs;  // `block` of them
    float limit;         // with flags: turn blocks with a magnitude above `limit` times the sum of all

    size_t blocks() const { return (count + block - 1) / block; }
};

// `turned` has layout.blocks() * layout.block values. `flags`, if given, has a byte for each block: 1 if the block is
// turned.
void rotate(const Rotation& layout, const WireSource& values, float* turned, uint8_t* flags, unsigned threads);
void rotate_back(const Rotation& layout, const float* turned, const uint8_t* flags, const WireTarget& values,
                 unsigned threads);

}  // namespace shrinkpoint
