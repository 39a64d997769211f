// Interleaved static rANS over bytes, each symbol under one of several tables.
//
// 32-bit states in [2^16, 2^32), 16-bit renormalisation, 12-bit probabilities (Duda, arXiv 1311.2540; the interleaving
// after Giesen, arXiv 1402.3392). Symbol i belongs to lane i % lanes; a stream is the lanes' states, then the words in
// the order in which a decoder that runs forward asks for them.
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
constexpr size_t kFewSymbols = 1 << 15;  // below this, the states of 32 lanes would weigh too much

inline unsigned lanes_for(size_t count) { return count < kFewSymbols ? 4 : kMaxLanes; }

using Histogram = std::array<uint64_t, 256>;
using Frequencies = std::array<uint16_t, 256>;  // sum to kProbabilityScale

// Frequencies of a histogram that is not all zero; every symbol that occurs keeps at least one.
Frequencies normalise(const Histogram& histogram);

// Entry for each of the 2^12 slots: symbol | (frequency - 1) << 8 | (slot - cumulative) << 20.
void decoder_table(const Frequencies& frequencies, uint32_t* entries);

// Upper bound of a stream's bytes.
inline size_t rans_bound(size_t count) { return 2 * count + 4 * kMaxLanes + 2; }

class PackedTables;

// Encodes streams under some tables, at least one.
class RansEncoder {
   public:
    explicit RansEncoder(const std::vector<Frequencies>& tables);
    ~RansEncoder();

    size_t tables() const { return tables_.size(); }

    // Writes at the end of out[0, capacity) and returns the size; capacity must be rans_bound(count). `tables` has the
    // table of each symbol; null where all are under the first.
    size_t encode(const uint8_t* symbols, const uint8_t* tables, size_t count, uint8_t* out, size_t capacity) const;

   private:
    struct Symbol {
        uint64_t reciprocal;  // ceil(2^44 / frequency)
        uint16_t frequency, cumulative;
    };
    std::vector<std::array<Symbol, 256>> tables_;
    std::unique_ptr<PackedTables> packed_;  // where vectors look them up
};

// Tables of a decoder: by the slot, and, where few symbols have most slots, by the ends of theirs.
class DecoderTables {
   public:
    explicit DecoderTables(const std::vector<Frequencies>& tables);

    static constexpr unsigned kFirst = 3, kMaxTables = 16;

    std::vector<uint32_t> entries;  // kProbabilityScale a table
    size_t count;
    // Behind the slots of symbol 0, of 0 and 1, and of 0 to 2, of each table. `few`: these are nearly all of some table.
    uint32_t ends[kFirst][kMaxTables] = {};
    bool few = false;
};

// Decodes a stream piece by piece. Never reads outside [data, data + size).
class RansDecoder {
   public:
    RansDecoder(const uint8_t* data, size_t size, size_t count, const DecoderTables& tables);
    RansDecoder(const RansDecoder&) = delete;
    RansDecoder& operator=(const RansDecoder&) = delete;
    // The next `count` symbols; all but the last call must ask for a multiple of the lanes. `tables` as above.
    void decode(const uint8_t* tables, size_t count, uint8_t* symbols);
    // Throws Corrupt unless the stream ended exactly where the encoder began.
    void finish() const;

    // What a.decode and b.decode do, faster: neither stream waits for the other. Same tables.
    static void decode_two(RansDecoder& a, const uint8_t* tables_a, uint8_t* symbols_a, RansDecoder& b,
                           const uint8_t* tables_b, uint8_t* symbols_b, size_t count);

   private:
    template <unsigned Lanes>
    void decode_lanes(const uint8_t* tables, size_t count, uint8_t* symbols);
    bool enter_tail();
    void check_end() const;

    const DecoderTables& all_;
    unsigned turns_by_slot_ = 0;  // pieces that are decoded by slots until those of few symbols are tried again
    const uint8_t* next_;
    const uint8_t* end_;    // of the stream
    const uint8_t* limit_;  // up to which rounds may read: beyond `end_` once the tail is entered
    unsigned lanes_;
    uint32_t states_[kMaxLanes];
    uint8_t tail_[3 * kRoundReach];  // the last bytes, and zeros
};

}  // namespace shrinkpoint
