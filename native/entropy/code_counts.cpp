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

// Counts symbol 0 under the common contexts; count is a multiple of kLanes * kBlocks.
SHRINKPOINT_AVX512 void count_common(const uint8_t* values, const uint8_t* base, size_t count, uint8_t largest,
                                     const uint8_t* common, size_t commons, uint32_t* counts, Uncounted& rest) {
    const __m512i most = _mm512_set1_epi8(static_cast<char>(largest));
    for (size_t start = 0; start < count; start += kLanes * kBlocks) {
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

}  // namespace

void CodeCounts::choose_common(const uint32_t* counts) {
    const auto frequency = [&](size_t context) { return counts[context * 256]; };
    std::vector<uint8_t> contexts(size_t{largest_} + 1);
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
    if (simd() != Simd::Avx512) return false;
    const size_t tile = tiles_++;
    if (tile % kTilesBetweenChoices == 1) choose_common(counts);
    if (!helps_ || count % (kLanes * kBlocks) != 0) return false;
    Uncounted rest;
    count_common(values, base, count, largest_, common_, commons_, counts, rest);
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
