#include "rans.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "error.hpp"
#include "simd.hpp"

namespace shrinkpoint {

namespace {

constexpr uint32_t kLow = 1u << 16;
constexpr uint32_t kSlotMask = kProbabilityScale - 1;

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
    // Rounding rarely hits the sum: hand out or take back one at a time where it changes the cost least.
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

EncoderTable encoder_table(const Frequencies& frequencies) {
    EncoderTable table{};
    uint32_t cumulative = 0;
    for (unsigned s = 0; s < 256; ++s) {
        const uint64_t f = frequencies[s];
        if (f > 0) table[s] = {((uint64_t{1} << 44) + f - 1) / f, frequencies[s], static_cast<uint16_t>(cumulative)};
        cumulative += frequencies[s];
    }
    return table;
}

void decoder_table(const Frequencies& frequencies, uint32_t* entries) {
    for (uint32_t s = 0; s < 256; ++s)
        for (uint32_t i = 0; i < frequencies[s]; ++i) *entries++ = s | (frequencies[s] - 1u) << 8 | i << 20;
}

#if defined(SHRINKPOINT_AVX512)
namespace {

using PackedTable = std::array<uint32_t, 256>;  // frequency | cumulative << 16

std::vector<PackedTable> pack(const std::vector<EncoderTable>& encoders) {
    std::vector<PackedTable> out(encoders.size());
    for (size_t t = 0; t < encoders.size(); ++t)
        for (unsigned s = 0; s < 256; ++s)
            out[t][s] = encoders[t][s].frequency | uint32_t{encoders[t][s].cumulative} << 16;
    return out;
}

// Sixteen lanes take one symbol each; the words they emit go in front of `next`.
SHRINKPOINT_AVX512 inline __m512i put16(__m512i states, const uint8_t* symbols, const uint8_t* tables,
                                        const PackedTable* packed, uint8_t*& next) {
    const __m512i symbol = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols)));
    const __m512i table = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables)));
    const __m512i index = _mm512_or_si512(_mm512_slli_epi32(table, 8), symbol);
    const __m512i entry = _mm512_i32gather_epi32(index, packed, 4);
    const __m512i frequency = _mm512_and_si512(entry, _mm512_set1_epi32(0xffff));
    const __mmask16 emit = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(states, 20), frequency);
    const unsigned emitted = static_cast<unsigned>(__builtin_popcount(emit));
    next -= 2 * emitted;
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(emit, states));
    _mm256_mask_storeu_epi16(next, static_cast<__mmask16>((1u << emitted) - 1), words);
    const __m512i x = _mm512_mask_srli_epi32(states, emit, states, 16);
    // x < frequency * 2^20, so a float quotient is off by one at most; the remainder tells in which direction.
    const __m512 ratio = _mm512_div_ps(_mm512_cvtepu32_ps(x), _mm512_cvtepu32_ps(frequency));
    __m512i quotient = _mm512_cvttps_epu32(ratio);
    __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, frequency));
    const __mmask16 above = _mm512_cmplt_epi32_mask(rest, _mm512_setzero_si512());
    rest = _mm512_mask_add_epi32(rest, above, rest, frequency);
    quotient = _mm512_mask_sub_epi32(quotient, above, quotient, _mm512_set1_epi32(1));
    const __mmask16 below = _mm512_cmpge_epi32_mask(rest, frequency);
    rest = _mm512_mask_sub_epi32(rest, below, rest, frequency);
    quotient = _mm512_mask_add_epi32(quotient, below, quotient, _mm512_set1_epi32(1));
    const __m512i offset = _mm512_add_epi32(rest, _mm512_srli_epi32(entry, 16));
    return _mm512_add_epi32(_mm512_slli_epi32(quotient, kProbabilityBits), offset);
}

// Encodes symbols[0, count), last first; count is a multiple of 32.
SHRINKPOINT_AVX512 void encode_rounds(const uint8_t* symbols, const uint8_t* tables, size_t count,
                                      const PackedTable* packed, uint32_t* states, uint8_t*& next) {
    __m512i first = _mm512_loadu_si512(states), second = _mm512_loadu_si512(states + 16);
    uint8_t* at = next;
    for (size_t i = count; i > 0;) {
        i -= kMaxLanes;
        second = put16(second, symbols + i + 16, tables + i + 16, packed, at);
        first = put16(first, symbols + i, tables + i, packed, at);
    }
    next = at;
    _mm512_storeu_si512(states, first);
    _mm512_storeu_si512(states + 16, second);
}

}  // namespace
#endif

size_t rans_encode(const uint8_t* symbols, const uint8_t* tables, size_t count,
                   const std::vector<EncoderTable>& encoders, uint8_t* out, size_t capacity) {
    const unsigned lanes = lanes_for(count);
    uint32_t states[kMaxLanes];
    std::fill_n(states, kMaxLanes, kLow);
    uint8_t* next = out + capacity;
    const auto step = [&](size_t i, uint32_t& state) {
        const EncoderSymbol& symbol = encoders[tables[i]][symbols[i]];
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
#if defined(SHRINKPOINT_AVX512)
    if (lanes == kMaxLanes && has_avx512()) {
        const std::vector<PackedTable> packed = pack(encoders);
        encode_rounds(symbols, tables, i, packed.data(), states, next);
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

RansDecoder::RansDecoder(const uint8_t* data, size_t size, size_t count, const uint32_t* entries)
    : entries_(entries), end_(data + size), lanes_(lanes_for(count)) {
    if (size < 4 * lanes_) throw Truncated("a symbol stream is shorter than its states");
    std::fill_n(states_, kMaxLanes, kLow);
    std::memcpy(states_, data, 4 * lanes_);
    next_ = data + 4 * lanes_;
}

#if defined(SHRINKPOINT_AVX512)
namespace {

// One renormalised step of sixteen lanes.
SHRINKPOINT_AVX512 inline __m512i step16(__m512i states, const uint8_t* tables, const uint32_t* entries,
                                         uint8_t* symbols, const uint8_t*& next) {
    const __m512i slots = _mm512_and_si512(states, _mm512_set1_epi32(kSlotMask));
    const __m512i table = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables)));
    const __m512i index = _mm512_or_si512(_mm512_slli_epi32(table, kProbabilityBits), slots);
    const __m512i entry = _mm512_i32gather_epi32(index, entries, 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm512_cvtepi32_epi8(entry));
    const __m512i less_one = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xfff));
    const __m512i high = _mm512_srli_epi32(states, kProbabilityBits);
    const __m512i bias = _mm512_add_epi32(high, _mm512_srli_epi32(entry, 20));
    const __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(less_one, high), bias);
    const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(kLow));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
    next += 2 * __builtin_popcount(low);
    return _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(low, words));
}

// As many whole rounds of 32 lanes as can be read without looking past `end`; returns the symbols done.
SHRINKPOINT_AVX512 size_t decode_rounds(const uint8_t* tables, size_t count, const uint32_t* entries,
                                        uint32_t* states, const uint8_t*& next, const uint8_t* end,
                                        uint8_t* symbols) {
    __m512i first = _mm512_loadu_si512(states), second = _mm512_loadu_si512(states + 16);
    const uint8_t* at = next;
    size_t i = 0;
    for (; i + kMaxLanes <= count && end - at >= static_cast<ptrdiff_t>(2 * kMaxLanes + 32); i += kMaxLanes) {
        first = step16(first, tables + i, entries, symbols + i, at);
        second = step16(second, tables + i + 16, entries, symbols + i + 16, at);
    }
    next = at;
    _mm512_storeu_si512(states, first);
    _mm512_storeu_si512(states + 16, second);
    return i;
}

}  // namespace
#endif

template <unsigned Lanes>
void RansDecoder::decode_lanes(const uint8_t* tables, size_t count, uint8_t* symbols) {
    const uint32_t* const entries = entries_;
    const uint8_t* next = next_;
    uint32_t states[Lanes];
    std::memcpy(states, states_, sizeof states);
    const auto advance = [&](size_t i, uint32_t& state) {
        const uint32_t entry = entries[(uint32_t{tables[i]} << kProbabilityBits) | (state & kSlotMask)];
        symbols[i] = static_cast<uint8_t>(entry);
        return (((entry >> 8) & 0xfff) + 1) * (state >> kProbabilityBits) + (entry >> 20);
    };
    size_t i = 0;
#if defined(SHRINKPOINT_AVX512)
    if (Lanes == kMaxLanes && has_avx512()) i = decode_rounds(tables, count, entries, states, next, end_, symbols);
#endif
    for (; i + Lanes <= count && static_cast<size_t>(end_ - next) >= 2 * Lanes; i += Lanes) {
#pragma GCC unroll 32
        for (unsigned lane = 0; lane < Lanes; ++lane) {
            const uint32_t x = advance(i + lane, states[lane]);
            uint16_t word;
            std::memcpy(&word, next, 2);
            const uint32_t low = x < kLow;  // no branch: it would be mispredicted at every third symbol
            states[lane] = x << (16 * low) | (word & (0 - low));
            next += 2 * low;
        }
    }
    for (; i < count; ++i) {
        uint32_t x = advance(i, states[i % Lanes]);
        if (x < kLow) {
            if (end_ - next < 2) throw Truncated("a symbol stream ends before its last symbol");
            uint16_t word;
            std::memcpy(&word, next, 2);
            next += 2;
            x = x << 16 | word;
        }
        states[i % Lanes] = x;
    }
    next_ = next;
    std::memcpy(states_, states, sizeof states);
}

void RansDecoder::decode(const uint8_t* tables, size_t count, uint8_t* symbols) {
    if (lanes_ == kMaxLanes)
        decode_lanes<kMaxLanes>(tables, count, symbols);
    else
        decode_lanes<4>(tables, count, symbols);
}

void RansDecoder::finish() const {
    const bool started = std::all_of(states_, states_ + kMaxLanes, [](uint32_t state) { return state == kLow; });
    if (!started || next_ != end_) throw Corrupt("a symbol stream does not end where its encoder began");
}

}  // namespace shrinkpoint
