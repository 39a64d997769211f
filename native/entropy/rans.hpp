// Interleaved static rANS over bytes, each symbol under one of several tables.
//
// 32-bit states in [2^16, 2^32), 16-bit renormalisation, 12-bit probabilities (Duda, arXiv 1311.2540; the interleaving
// after Giesen, arXiv 1402.3392). Symbol i belongs to lane i % lanes. A stream is the lanes' states, then the words in
// the order in which a decoder that runs forward asks for them.
//
// A worked example, one lane. Symbol a has frequency 3072 of 4096 (3/4, 0.42 bits) and the slots 0 to 3071. Symbol b
// has frequency 1024 (1/4, 2 bits) and the slots 3072 to 4095. The encoder takes the symbols of "ab" last first, from
// the state 2^16 = 65536:
//    b: 65536 = 64 * 1024 + 0        -> 64 * 4096 + 0 + 3072  = 265216
//    a: 265216 = 86 * 3072 + 1024    -> 86 * 4096 + 1024 + 0  = 353280
// The state grew by log2(353280 / 65536) = 2.43 bits; a and b cost 2.42. The decoder undoes the steps, first symbol
// first:
//    353280 % 4096 = 1024, a slot of a -> 3072 * (353280 / 4096) + 1024 - 0    = 3072 * 86 + 1024 = 265216
//    265216 % 4096 = 3072, a slot of b -> 1024 * (265216 / 4096) + 3072 - 3072 = 1024 * 64 + 0    = 65536
// Back at 65536, where the encoder began: finish() checks that. A state that a symbol would carry past 2^32 first gives
// its low 16 bits to the stream. Before b, whose bound is 1024 * 2^20 = 2^30, the state 0x40000005 emits the word
// 0x0005 and goes on as 0x4000, and b makes it 16 * 4096 + 0 + 3072 = 68608. The decoder finds b, is at 0x4000, which
// is below 2^16, and takes the word back: 0x40000005.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace shrinkpoint {

constexpr unsigned kProbabilityBits = 12;
constexpr uint32_t kProbabilityScale = 1u << kProbabilityBits;
constexpr uint32_t kRansLow = 1u << 16;  // states stay at or above it
constexpr unsigned kMaxLanes = 32;
constexpr size_t kRoundReach = 2 * kMaxLanes + 32;  // a round takes at most 64 bytes and looks at 32 more
constexpr size_t kFewSymbols = 1 << 15;  // below this, the states of 32 lanes cost too much

inline unsigned lanes_for(size_t count) { return count < kFewSymbols ? 4 : kMaxLanes; }

using Histogram = std::array<uint64_t, 256>;
using Frequencies = std::array<uint16_t, 256>;  // sum to kProbabilityScale

// Scales a histogram that is not all zero to a sum of 4096; every symbol that occurs keeps at least 1. Counts 3 and 1
// become 3072 and 1024.
Frequencies normalise(const Histogram& histogram);

// Fills an entry for each of the 2^12 slots: symbol | (frequency - 1) << 8 | (slot - cumulative) << 20. In the example
// above slot 1024 has 0x400bff00 (symbol 0, 3072, 1024 slots in) and slot 3072 has 0x0003ff01 (symbol 1, 1024, 0 slots
// in).
void decoder_table(const Frequencies& frequencies, uint32_t* entries);

// Upper bound of a stream's bytes.
inline size_t rans_bound(size_t count) { return 2 * count + 4 * kMaxLanes + 2; }

class PackedTables;

// Encodes streams under at least one table.
class RansEncoder {
   public:
    explicit RansEncoder(const std::vector<Frequencies>& tables);
    ~RansEncoder();

    size_t tables() const { return tables_.size(); }

    // Writes at the end of out[0, capacity) and returns the size; capacity must be rans_bound(count). `tables` holds
    // the table of each symbol, or is null if all symbols are under the first table.
    size_t encode(const uint8_t* symbols, const uint8_t* tables, size_t count, uint8_t* out, size_t capacity) const;

   private:
    struct Symbol {
        uint64_t reciprocal;  // ceil(2^44 / frequency)
        uint16_t frequency, cumulative;
    };
    std::vector<std::array<Symbol, 256>> tables_;
    std::unique_ptr<PackedTables> packed_;  // the same tables for vectors
};

// Tables of a decoder: one entry a slot, and for tables in which few symbols own most slots, where those symbols' slots
// end.
class DecoderTables {
   public:
    explicit DecoderTables(const std::vector<Frequencies>& tables);

    static constexpr unsigned kFirst = 3, kMaxTables = 16;

    std::vector<uint32_t> entries;  // kProbabilityScale a table
    size_t count;
    // The slot behind symbol 0, behind 1 and behind 2, for each table. `few` is true if these three own nearly all
    // slots of some table, `rare` if symbol 0 alone does. `all_first` is true if it owns every slot of every table.
    uint32_t ends[kFirst][kMaxTables] = {};
    bool few = false, rare = false, all_first = false;
};

// Pieces of a stream until a look-up that met too many other symbols is tried again.
struct Pauses {
    unsigned by_first = 0, by_ends = 0;
};

// Decodes a stream in pieces. Never reads outside [data, data + size).
class RansDecoder {
   public:
    RansDecoder(const uint8_t* data, size_t size, size_t count, const DecoderTables& tables);
    RansDecoder(const RansDecoder&) = delete;
    RansDecoder& operator=(const RansDecoder&) = delete;
    // Decodes the next `count` symbols. All calls but the last must ask for a multiple of the lanes. `tables` is as
    // above.
    void decode(const uint8_t* tables, size_t count, uint8_t* symbols);
    // Throws Corrupt unless the stream ended exactly where the encoder began.
    void finish() const;

    // Same as a.decode and b.decode, but faster: neither stream waits for the other. Both use the same tables.
    static void decode_two(RansDecoder& a, const uint8_t* tables_a, uint8_t* symbols_a, RansDecoder& b,
                           const uint8_t* tables_b, uint8_t* symbols_b, size_t count);

   private:
    template <unsigned Lanes>
    void decode_lanes(const uint8_t* tables, size_t count, uint8_t* symbols);
    bool enter_tail();
    void check_end() const;

    const DecoderTables& all_;
    [[maybe_unused]] Pauses pauses_;  // of vectors
    const uint8_t* next_;
    const uint8_t* end_;    // end of the stream
    const uint8_t* limit_;  // rounds may read up to here: beyond `end_` in the tail
    unsigned lanes_;
    uint32_t states_[kMaxLanes];
    uint8_t tail_[3 * kRoundReach];  // the last bytes, and zeros
};

}  // namespace shrinkpoint
