#include "entropy/rans.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.hpp"
#include "base/simd.hpp"
#include "entropy/rans_vectors.hpp"

namespace shrinkpoint {

namespace {

constexpr uint32_t kSlotMask = kProbabilityScale - 1;
constexpr uint32_t kFewSlots = kProbabilityScale - kProbabilityScale / 32;
constexpr uint32_t kRareSlots = kProbabilityScale - kProbabilityScale / 256;

}  // namespace

Frequencies normalise(const Histogram& histogram) {
    const uint64_t total = std::accumulate(histogram.begin(), histogram.end(), uint64_t{0});
    Frequencies out{};
    int64_t left = kProbabilityScale;
    for (unsigned s = 0; s < 256; ++s) {
        if (histogram[s] == 0) continue;
        const double share = static_cast<double>(histogram[s]) / static_cast<double>(total) * kProbabilityScale;
        out[s] = static_cast<uint16_t>(std::max(1.0, std::floor(share + 0.5)));
        left -= out[s];
    }
    // Rounding rarely hits the sum. Add or remove one at a time where that changes the cost least.
    while (left != 0) {
        const int step = left > 0 ? 1 : -1;
        unsigned best = 256;
        double best_gain = 0;
        for (unsigned s = 0; s < 256; ++s) {
            if (out[s] == 0 || out[s] + step < 1) continue;
            const double gain = static_cast<double>(histogram[s]) *
                                std::log2(static_cast<double>(out[s] + step) / static_cast<double>(out[s]));
            if (best == 256 || gain > best_gain) best = s, best_gain = gain;
        }
        out[best] = static_cast<uint16_t>(out[best] + step);
        left -= step;
    }
    return out;
}

void decoder_table(const Frequencies& frequencies, uint32_t* entries) {
    for (uint32_t s = 0; s < 256; ++s)
        for (uint32_t i = 0; i < frequencies[s]; ++i) *entries++ = s | (frequencies[s] - 1u) << 8 | i << 20;
}

DecoderTables::DecoderTables(const std::vector<Frequencies>& tables)
    : entries(tables.size() * kProbabilityScale), count(tables.size()) {
    for (size_t t = 0; t < count; ++t) decoder_table(tables[t], entries.data() + t * kProbabilityScale);
    const auto is_first = [](const Frequencies& table) { return table[0] == kProbabilityScale; };
    all_first = std::all_of(tables.begin(), tables.end(), is_first);
    for (size_t t = 0; t < count && count <= kMaxTables; ++t) {
        uint32_t end = 0;
        for (unsigned s = 0; s < kFirst; ++s) ends[s][t] = end += tables[t][s];
        few = few || end >= kFewSlots;
        rare = rare || ends[0][t] >= kRareSlots;
    }
}

RansEncoder::RansEncoder(const std::vector<Frequencies>& tables) : tables_(tables.size()) {
    for (size_t t = 0; t < tables.size(); ++t) {
        uint32_t cumulative = 0;
        for (unsigned s = 0; s < 256; ++s) {
            const uint64_t f = tables[t][s];
            if (f > 0)
                tables_[t][s] = {((uint64_t{1} << 44) + f - 1) / f, tables[t][s], static_cast<uint16_t>(cumulative)};
            cumulative += tables[t][s];
        }
    }
#if defined(SHRINKPOINT_X86)
    packed_ = std::make_unique<PackedTables>(tables);
#endif
}

#if defined(SHRINKPOINT_X86)
namespace {

// The largest float that is not above 1 / frequency.
float reciprocal_below(uint16_t frequency) {
    const float nearest = 1.0f / static_cast<float>(frequency);
    return static_cast<double>(nearest) * frequency > 1 ? std::nextafter(nearest, 0.0f) : nearest;
}

uint64_t with_reciprocal(uint32_t entry, uint16_t frequency) {
    const uint64_t reciprocal = std::min((uint64_t{1} << 32) / frequency, uint64_t{UINT32_MAX});
    return reciprocal << 32 | entry;
}

}  // namespace

PackedTables::PackedTables(const std::vector<Frequencies>& tables) {
    if (simd() == Simd::None) return;
    const bool is_wide = simd() == Simd::Avx512;
    for (const Frequencies& table : tables)
        for (unsigned s = 0; s < 256; ++s)
            while (table[s] != 0 && s >> symbol_bits != 0) ++symbol_bits;
    const bool fit = is_wide && tables.size() << symbol_bits <= kRegisterEntries;
    if (!fit) symbol_bits = 8;
    const size_t size = std::max<size_t>(kRegisterEntries, tables.size() << symbol_bits);
    if (is_wide) entries.resize(size);
    if (fit) reciprocals.resize(size);
    if (!is_wide) with_reciprocals.resize(size);
    for (size_t t = 0; t < tables.size(); ++t) {
        uint32_t cumulative = 0;
        for (unsigned s = 0; s < 256; ++s) {
            const uint16_t frequency = tables[t][s];
            if (frequency == 0) continue;
            const size_t index = t << symbol_bits | s;
            const uint32_t entry = frequency | cumulative << 16;
            if (is_wide) entries[index] = entry;
            if (fit) reciprocals[index] = reciprocal_below(frequency);
            if (!is_wide) with_reciprocals[index] = with_reciprocal(entry, frequency);
            cumulative += frequency;
        }
    }
}
#endif

RansEncoder::~RansEncoder() = default;

size_t RansEncoder::encode(const uint8_t* symbols, const uint8_t* tables, size_t count, uint8_t* out,
                           size_t capacity) const {
    const unsigned lanes = lanes_for(count);
    uint32_t states[kMaxLanes];
    std::fill_n(states, kMaxLanes, kRansLow);
    uint8_t* next = out + capacity;
    const auto step = [&](size_t i, uint32_t& state) {
        const Symbol& symbol = tables_[tables != nullptr ? tables[i] : 0][symbols[i]];
        uint32_t x = state;
        const bool emit = (x >> 20) >= symbol.frequency;
        const auto word = static_cast<uint16_t>(x);
        std::memcpy(next - 2, &word, 2);  // unconditionally: a branch here is mispredicted at every third symbol
        next -= 2 * emit;
        x >>= 16 * emit;
        const auto quotient = static_cast<uint32_t>((x * symbol.reciprocal) >> 44);
        state = x + quotient * (kProbabilityScale - symbol.frequency) + symbol.cumulative;
    };
    size_t i = count;
    while (i % lanes != 0) --i, step(i, states[i % lanes]);
#if defined(SHRINKPOINT_X86)
    if (lanes == kMaxLanes && !packed_->entries.empty()) {
        encode_rounds_avx512(symbols, tables, i, *packed_, states, next);
        i = 0;
    } else if (lanes == kMaxLanes && !packed_->with_reciprocals.empty()) {
        encode_rounds_avx2(symbols, tables, i, *packed_, states, next);
        i = 0;
    }
#endif
    if (lanes == kMaxLanes) {
        while (i > 0) {
            i -= kMaxLanes;
#pragma GCC unroll 32
            for (unsigned lane = kMaxLanes; lane-- > 0;) step(i + lane, states[lane]);
        }
    } else {
        while (i > 0) --i, step(i, states[i % lanes]);
    }
    next -= 4 * lanes;
    std::memcpy(next, states, 4 * lanes);
    return static_cast<size_t>(out + capacity - next);
}

RansDecoder::RansDecoder(const uint8_t* data, size_t size, size_t count, const DecoderTables& tables)
    : all_(tables), end_(data + size), limit_(end_), lanes_(lanes_for(count)) {
    if (size < 4 * lanes_) throw Truncated("a symbol stream is shorter than its states");
    std::fill_n(states_, kMaxLanes, kRansLow);
    std::memcpy(states_, data, 4 * lanes_);
    next_ = data + 4 * lanes_;
}

// Copies the last bytes, too few for a round, to where zeros follow them. A stream of few bits a symbol has many rounds
// left in its last bytes, and rounds are faster than single symbols. Returns true if there is more to read now.
bool RansDecoder::enter_tail() {
    const auto rest = static_cast<size_t>(end_ - next_);
    if (limit_ != end_ || rest >= kRoundReach) return false;
    std::memset(tail_, 0, sizeof tail_);
    std::memcpy(tail_, next_, rest);
    next_ = tail_, end_ = tail_ + rest, limit_ = tail_ + sizeof tail_;
    return true;
}

void RansDecoder::check_end() const {
    if (next_ > end_) throw Truncated("a symbol stream ends before its last symbol");
}

#if defined(SHRINKPOINT_X86)
namespace {

// Decodes rounds of one stream or of two by this processor's vectors, of which it has some.
template <typename... Runs>
size_t decode_rounds(size_t count, const DecoderTables& tables, Pauses& pauses, Runs&... runs) {
    if (simd() == Simd::Avx512) return decode_rounds_avx512(runs..., count, tables, pauses);
    return decode_rounds_avx2(runs..., count, tables, pauses);
}

}  // namespace
#endif

template <unsigned Lanes>
void RansDecoder::decode_lanes(const uint8_t* tables, size_t count, uint8_t* symbols) {
    const uint32_t* const entries = all_.entries.data();
    const auto advance = [&](size_t i, uint32_t& state) {
        const uint32_t entry = entries[(tables != nullptr ? uint32_t{tables[i]} << kProbabilityBits : 0) | (state & kSlotMask)];
        symbols[i] = static_cast<uint8_t>(entry);
        return (((entry >> 8) & 0xfff) + 1) * (state >> kProbabilityBits) + (entry >> 20);
    };
    size_t i = 0;
    do {
        const uint8_t* next = next_;
        uint32_t states[Lanes];
        std::memcpy(states, states_, sizeof states);
#if defined(SHRINKPOINT_X86)
        if (Lanes == kMaxLanes && simd() != Simd::None) {
            DecodeRun run{tables != nullptr ? tables + i : nullptr, symbols + i, next, limit_, states};
            i += decode_rounds(count - i, all_, pauses_, run);
            next = run.next;
        }
#endif
        for (; i + Lanes <= count && static_cast<size_t>(limit_ - next) >= kRoundReach; i += Lanes) {
#pragma GCC unroll 32
            for (unsigned lane = 0; lane < Lanes; ++lane) {
                const uint32_t x = advance(i + lane, states[lane]);
                uint16_t word;
                std::memcpy(&word, next, 2);
                const uint32_t low = x < kRansLow;  // no branch: it would be mispredicted at every third symbol
                states[lane] = x << (16 * low) | (word & (0 - low));
                next += 2 * low;
            }
        }
        next_ = next;
        std::memcpy(states_, states, sizeof states);
    } while (i + Lanes <= count && enter_tail());
    check_end();
    for (; i < count; ++i) {
        uint32_t x = advance(i, states_[i % Lanes]);
        if (x < kRansLow) {
            if (end_ - next_ < 2) throw Truncated("a symbol stream ends before its last symbol");
            uint16_t word;
            std::memcpy(&word, next_, 2);
            next_ += 2;
            x = x << 16 | word;
        }
        states_[i % Lanes] = x;
    }
}

void RansDecoder::decode(const uint8_t* tables, size_t count, uint8_t* symbols) {
    if (all_.all_first) return void(std::memset(symbols, 0, count));  // no state changes
    if (lanes_ == kMaxLanes)
        decode_lanes<kMaxLanes>(tables, count, symbols);
    else
        decode_lanes<4>(tables, count, symbols);
}

void RansDecoder::decode_two(RansDecoder& a, const uint8_t* tables_a, uint8_t* symbols_a, RansDecoder& b,
                             const uint8_t* tables_b, uint8_t* symbols_b, size_t count) {
    const auto from = [](const uint8_t* tables, size_t i) { return tables != nullptr ? tables + i : nullptr; };
    size_t done = 0;
#if defined(SHRINKPOINT_X86)
    if (a.lanes_ == kMaxLanes && b.lanes_ == kMaxLanes && simd() != Simd::None && !a.all_.all_first) {
        do {
            DecodeRun run_a{from(tables_a, done), symbols_a + done, a.next_, a.limit_, a.states_};
            DecodeRun run_b{from(tables_b, done), symbols_b + done, b.next_, b.limit_, b.states_};
            done += decode_rounds(count - done, a.all_, a.pauses_, run_a, run_b);
            a.next_ = run_a.next, b.next_ = run_b.next;
        } while (done + kMaxLanes <= count && (a.enter_tail() | b.enter_tail()));
        a.check_end(), b.check_end();
    }
#endif
    a.decode(from(tables_a, done), count - done, symbols_a + done);
    b.decode(from(tables_b, done), count - done, symbols_b + done);
}

void RansDecoder::finish() const {
    const bool started = std::all_of(states_, states_ + kMaxLanes, [](uint32_t state) { return state == kRansLow; });
    if (!started || next_ != end_) throw Corrupt("a symbol stream does not end where its encoder began");
}

}  // namespace shrinkpoint
