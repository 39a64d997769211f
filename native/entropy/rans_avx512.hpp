// The rounds of 32 lanes, sixteen lanes a register.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/simd.hpp"
#include "entropy/rans.hpp"

namespace shrinkpoint {

#if defined(SHRINKPOINT_X86)

// One stream being decoded.
struct DecodeRun {
    const uint8_t* tables;  // null where every symbol is under the first table
    uint8_t* symbols;
    const uint8_t* next;
    const uint8_t* end;
    uint32_t* states;
};

// As many whole rounds as can be read without looking past `end`; returns the symbols done and moves `next`.
// `turns_by_slot` is 0 at first, and kept between the calls of one stream: where the first symbols of the tables prove
// rare, so many calls look all of them up by their slots.
size_t decode_rounds_avx512(DecodeRun& run, size_t count, const DecoderTables& tables, unsigned& turns_by_slot);

// The same rounds of two streams, turn and turn about: a round waits for the one before it in its own stream only.
// Both have tables or neither has.
size_t decode_rounds_avx512(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables,
                            unsigned& turns_by_slot);

// Tables of an encoder as vectors look them up.
class PackedTables {
   public:
    explicit PackedTables(const std::vector<Frequencies>& tables);

    // Of a symbol under a table: table << symbol_bits | symbol.
    unsigned symbol_bits;
    std::vector<uint32_t> entries;   // frequency | cumulative << 16
    std::vector<float> reciprocals;  // of the frequencies, rounded down; none for more entries than registers hold
};

// Encodes symbols[0, count), last first; count is a multiple of 32. Words go in front of `next`, and up to 32 bytes
// there are overwritten. `tables` may be null as above.
void encode_rounds_avx512(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                          uint32_t* states, uint8_t*& next);

#else
class PackedTables {};
#endif

}  // namespace shrinkpoint
