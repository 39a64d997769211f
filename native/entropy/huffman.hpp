// Canonical Huffman codes of at most 15 bits: docs/format.md, "CyclicDelta deltas".
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bit_reader.hpp"
#include "base/bit_writer.hpp"

namespace shrinkpoint {

constexpr unsigned kMaxCodeBits = 15;  // a length then takes 4 bits

// Returns the lengths of the best code of at most kMaxCodeBits bits for these counts, 0 for symbols that do not occur.
// A single symbol gets 1 bit, the shortest that a Huffman code has.
std::vector<uint8_t> huffman_lengths(const std::vector<uint64_t>& counts);

struct HuffmanCode {
    uint16_t bits;  // first bit of the code is lowest
    uint8_t length;
};
std::vector<HuffmanCode> huffman_codes(const std::vector<uint8_t>& lengths);

// Writes the table that precedes the codes. At least one length must not be 0.
void write_lengths(const std::vector<uint8_t>& lengths, BitWriter& bits);
uint64_t lengths_bits(const std::vector<uint8_t>& lengths);
// Reads the lengths of `alphabet` symbols. Throws Corrupt or Truncated unless they make a complete code or the code of
// a single symbol.
std::vector<uint8_t> read_lengths(BitSource& bits, size_t alphabet);

class HuffmanDecoder {
   public:
    // Builds the decoder from lengths that read_lengths returned.
    explicit HuffmanDecoder(const std::vector<uint8_t>& lengths);

    // Decodes the next symbol; 15 bits must be in the buffer. Throws Corrupt for bits that are no code.
    unsigned next(BitSource& bits) const {
        const uint16_t entry = entries_[bits.peek(table_bits_)];
        if (entry == 0) return next_long(bits);
        bits.skip(entry & 15u);
        return entry >> 4;
    }

   private:
    unsigned next_long(BitSource& bits) const;

    unsigned table_bits_;
    std::vector<uint16_t> entries_;                     // symbol and length of the code that the bits begin with, or 0
    std::vector<uint16_t> sorted_;                      // symbols in the order of their codes
    std::array<uint16_t, kMaxCodeBits + 1> counts_{};  // number of codes of each length
};

}  // namespace shrinkpoint
