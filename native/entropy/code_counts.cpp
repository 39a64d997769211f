#include "entropy/code_counts.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/simd.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#endif

namespace shrinkpoint {

#if defined(SHRINKPOINT_X86)
namespace {

constexpr size_t kLanes = 64, kBlocks = 4;
constexpr size_t kGroup = kLanes * kBlocks;  // positions that vectors count at a time
constexpr uint8_t kNotZero = 255;            // stands for the context where the symbol is not 0
constexpr size_t kTilesBetweenChoices = 64;

// Positions that no comparison counts, and the symbols and contexts of the whole tile.
struct alignas(64) Uncounted {
    uint8_t symbols[kTile], contexts[kTile];
    uint16_t positions[kTile + 32];
    size_t count = 0;
};

// Appends `first` + the index of every bit.
SHRINKPOINT_INLINE512 void append(__mmask64 mask, size_t first, Uncounted& rest) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (unsigned part = 0; part < kLanes; part += 16) {
        const auto bits = static_cast<__mmask16>(mask >> part);
        const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first + part)));
        const __m256i positions = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(bits, index));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest.positions + rest.count), positions);
        rest.count += static_cast<size_t>(__builtin_popcount(bits));
    }
}

// Counts symbol 0 under the common contexts; count is a multiple of kGroup.
SHRINKPOINT_AVX512 void count_common_avx512(const uint8_t* values, const uint8_t* base, size_t count, uint8_t largest,
                                            const uint8_t* common, size_t commons, uint32_t* counts, Uncounted& rest) {
    const __m512i most = _mm512_set1_epi8(static_cast<char>(largest));
    for (size_t start = 0; start < count; start += kGroup) {
        __m512i contexts[kBlocks];
        __mmask64 zero[kBlocks];
        uint64_t counted[kBlocks] = {};
        for (size_t b = 0; b < kBlocks; ++b) {
            const size_t at = start + b * kLanes;
            const __m512i parent = _mm512_loadu_si512(base + at);
            const __m512i difference = _mm512_sub_epi8(_mm512_loadu_si512(values + at), parent);
            const __m512i negative = _mm512_movm_epi8(_mm512_movepi8_mask(difference));
            _mm512_store_si512(rest.symbols + at, _mm512_xor_si512(_mm512_add_epi8(difference, difference), negative));
            contexts[b] = _mm512_min_epu8(parent, most);
            _mm512_store_si512(rest.contexts + at, contexts[b]);
            zero[b] = _mm512_testn_epi8_mask(difference, difference);
        }
        for (size_t k = 0; k < commons; ++k) {
            const __m512i context = _mm512_set1_epi8(static_cast<char>(common[k]));
            uint32_t sum = 0;
            for (size_t b = 0; b < kBlocks; ++b) {
                const uint64_t same = _mm512_mask_cmpeq_epi8_mask(zero[b], contexts[b], context);
                counted[b] |= same;
                sum += static_cast<uint32_t>(__builtin_popcountll(same));
            }
            counts[size_t{common[k]} * 256] += sum;
        }
        for (size_t b = 0; b < kBlocks; ++b) append(~counted[b], start + b * kLanes, rest);
    }
}

SHRINKPOINT_INLINE256 __m256i load32(const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

SHRINKPOINT_INLINE256 __m256i broadcast(const uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// A set of bytes: for each low half of a byte a bit of each high half, those below 8 and the others.
struct ByteSet {
    alignas(16) uint8_t low[16] = {}, high[16] = {};

    ByteSet(const uint8_t* bytes, size_t count) {
        for (size_t k = 0; k < count; ++k)
            (bytes[k] < 128 ? low : high)[bytes[k] & 15] |= static_cast<uint8_t>(1 << (bytes[k] >> 4 & 7));
    }
};

// All ones for each byte that is not in the set.
SHRINKPOINT_INLINE256 __m256i not_in(const ByteSet& set, __m256i bytes) {
    alignas(16) static constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const __m256i half = _mm256_set1_epi8(15), row = _mm256_and_si256(bytes, half);
    const __m256i bit = _mm256_shuffle_epi8(broadcast(kBits), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half));
    const __m256i below = _mm256_shuffle_epi8(broadcast(set.low), row), above = _mm256_shuffle_epi8(broadcast(set.high), row);
    const __m256i bits = _mm256_and_si256(_mm256_blendv_epi8(below, above, bytes), bit);
    return _mm256_cmpeq_epi8(bits, _mm256_setzero_si256());
}

// The same without masks: what is common is found in a set, then counted context by context. kNotZero is not common.
SHRINKPOINT_AVX2 void count_common_avx2(const uint8_t* values, const uint8_t* base, size_t count, uint8_t largest,
                                        const uint8_t* common, size_t commons, uint32_t* counts, Uncounted& rest) {
    alignas(32) uint8_t keys[kTile];
    const ByteSet set(common, commons);
    const __m256i most = _mm256_set1_epi8(static_cast<char>(largest)), zeros = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += 32) {
        const __m256i parent = load32(base + i), difference = _mm256_sub_epi8(load32(values + i), parent);
        const __m256i negative = _mm256_cmpgt_epi8(zeros, difference), context = _mm256_min_epu8(parent, most);
        const __m256i symbol = _mm256_xor_si256(_mm256_add_epi8(difference, difference), negative);
        _mm256_store_si256(reinterpret_cast<__m256i*>(rest.symbols + i), symbol);
        _mm256_store_si256(reinterpret_cast<__m256i*>(rest.contexts + i), context);
        const __m256i is_zero = _mm256_cmpeq_epi8(difference, zeros);
        const __m256i key = _mm256_blendv_epi8(_mm256_set1_epi8(static_cast<char>(kNotZero)), context, is_zero);
        _mm256_store_si256(reinterpret_cast<__m256i*>(keys + i), key);
        auto left = static_cast<uint32_t>(_mm256_movemask_epi8(not_in(set, key)));
        for (; left != 0; left &= left - 1)
            rest.positions[rest.count++] = static_cast<uint16_t>(i + static_cast<size_t>(__builtin_ctz(left)));
    }
    for (size_t k = 0; k < commons; ++k) {
        const __m256i context = _mm256_set1_epi8(static_cast<char>(common[k]));
        __m256i sums = zeros;  // at most kTile / 32 in a byte
        for (size_t i = 0; i < count; i += 32) sums = _mm256_sub_epi8(sums, _mm256_cmpeq_epi8(load32(keys + i), context));
        alignas(32) uint64_t parts[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(parts), _mm256_sad_epu8(sums, zeros));
        counts[size_t{common[k]} * 256] += static_cast<uint32_t>(parts[0] + parts[1] + parts[2] + parts[3]);
    }
}

}  // namespace

void CodeCounts::choose_common(const uint32_t* counts) {
    const auto frequency = [&](size_t context) { return counts[context * 256]; };
    std::vector<uint8_t> contexts(std::min<size_t>(largest_ + 1u, kNotZero));
    std::iota(contexts.begin(), contexts.end(), uint8_t{0});
    uint64_t all = 0;
    for (const uint8_t context : contexts) all += frequency(context);
    std::sort(contexts.begin(), contexts.end(), [&](uint8_t a, uint8_t b) { return frequency(a) > frequency(b); });
    commons_ = 0;
    while (commons_ < std::min(contexts.size(), kMaxCommon) && frequency(contexts[commons_]) > all / 256) {
        common_[commons_] = contexts[commons_];
        ++commons_;
    }
    helps_ = commons_ > 0;
}

bool CodeCounts::add(const uint8_t* values, const uint8_t* base, size_t count, uint32_t* counts) {
    if (simd() == Simd::None) return false;
    const size_t tile = tiles_++;
    if (tile % kTilesBetweenChoices == 1) choose_common(counts);
    if (!helps_ || count % kGroup != 0) return false;
    Uncounted rest;
    (simd() == Simd::Avx512 ? count_common_avx512 : count_common_avx2)(values, base, count, largest_, common_, commons_, counts,
                                                                rest);
    for (size_t i = 0; i < rest.count; ++i) {
        const size_t position = rest.positions[i];
        ++counts[size_t{rest.contexts[position]} * 256 + rest.symbols[position]];
    }
    helps_ = rest.count < count / 2;
    return true;
}
#else
bool CodeCounts::add(const uint8_t*, const uint8_t*, size_t, uint32_t*) { return false; }
#endif

}  // namespace shrinkpoint
