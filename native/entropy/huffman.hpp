// Canonical Huffman codes of at most 15 bits: docs/format.md, "CyclicDelta deltas".
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bit_reader.hpp"
#include "base/bit_writer.hpp"

namespace shrinkpoint {

constexpr unsigned kMaxCodeBits = 15;  // so that a length takes 4 bits

// The lengths of the best code of at most kMaxCodeBits bits for symbols that occur so often; 0 for those that do not.
// A symbol that is alone gets 1 bit: a Huffman code has no shorter one.
std::vector<uint8_t> huffman_lengths(const std::vector<uint64_t>& counts);

struct HuffmanCode {
    uint16_t bits;  // the first bit of the code lowest
    uint8_t length;
};
std::vector<HuffmanCode> huffman_codes(const std::vector<uint8_t>& lengths);

// The table as it stands before the codes; some length must not be 0.
void write_lengths(const std::vector<uint8_t>& lengths, BitWriter& bits);
uint64_t lengths_bits(const std::vector<uint8_t>& lengths);
// The lengths of `alphabet` symbols. Throws Corrupt or Truncated unless they make a whole code or that of one symbol.
std::vector<uint8_t> read_lengths(BitSource& bits, size_t alphabet);

class HuffmanDecoder {
   public:
    // From lengths that read_lengths returned.
    explicit HuffmanDecoder(const std::vector<uint8_t>& lengths);

    // The next symbol; 15 bits must be at hand. Throws Corrupt for bits that are no code.
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
    std::array<uint16_t, kMaxCodeBits + 1> counts_{};  // of codes of each length
};

}  // namespace shrinkpoint
