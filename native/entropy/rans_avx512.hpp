// Rounds of 32 lanes, sixteen lanes a register.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/simd.hpp"
#include "entropy/rans.hpp"

namespace shrinkpoint {

#if defined(SHRINKPOINT_X86)

// A stream being decoded.
struct DecodeRun {
    const uint8_t* tables;  // null if every symbol is under the first table
    uint8_t* symbols;
    const uint8_t* next;
    const uint8_t* end;
    uint32_t* states;
};

// Decodes as many whole rounds as can be read without looking past `end`. Returns the symbols done and moves `next`.
// `turns_by_slot` is 0 at first and kept between the calls of one stream. If the first symbols of the tables prove
// rare, it counts the calls that look all symbols up by their slots.
size_t decode_rounds_avx512(DecodeRun& run, size_t count, const DecoderTables& tables, unsigned& turns_by_slot);

// Decodes rounds of two streams in turn: a round waits only for the round before it in its own stream. Both streams
// have tables or neither has.
size_t decode_rounds_avx512(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables,
                            unsigned& turns_by_slot);

// Tables of an encoder in the layout that vector look-ups need.
class PackedTables {
   public:
    explicit PackedTables(const std::vector<Frequencies>& tables);

    // The index of a symbol under a table: table << symbol_bits | symbol.
    unsigned symbol_bits;
    std::vector<uint32_t> entries;   // frequency | cumulative << 16
    std::vector<float> reciprocals;  // 1 / frequency, rounded down; empty for more entries than registers hold
};

// Encodes symbols[0, count), last first; count is a multiple of 32. Writes words in front of `next` and overwrites up
// to 32 bytes there. `tables` may be null as above.
void encode_rounds_avx512(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                          uint32_t* states, uint8_t*& next);

#else
class PackedTables {};
#endif

}  // namespace shrinkpoint
