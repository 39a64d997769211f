#include "entropy/table_map.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "entropy/model.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#endif

namespace shrinkpoint {

#if defined(SHRINKPOINT_X86)
namespace {

// The words at `indices` (modulo 64) of the first two registers, or of the last two if `second`.
SHRINKPOINT_INLINE512 __m512i pick_words(const __m512i* registers, __m512i indices, __mmask32 second) {
    const __m512i first = _mm512_permutex2var_epi16(registers[0], indices, registers[1]);
    return _mm512_mask_blend_epi16(second, first, _mm512_permutex2var_epi16(registers[2], indices, registers[3]));
}

// Picks the context's entry of the two in each word: the upper if the context is odd.
SHRINKPOINT_INLINE512 void store_entries(__m512i words, __m512i contexts, uint8_t* out) {
    const __mmask32 odd = _mm512_test_epi16_mask(contexts, _mm512_set1_epi16(1));
    const __m512i entries = _mm512_mask_srli_epi16(words, odd, words, 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(entries));
}

// Holds the whole map in eight registers, two entries a 16-bit word. Returns the positions done.
SHRINKPOINT_AVX512 size_t look_up_avx512(const uint8_t* map, const uint16_t* contexts, size_t count,
                                         uint8_t* tables) {
    __m512i words[8];
    for (unsigned k = 0; k < 8; ++k) words[k] = _mm512_loadu_si512(map + 64 * k);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i context = _mm512_loadu_si512(contexts + i);
        const __m512i word = _mm512_srli_epi16(context, 1);
        const __mmask32 second = _mm512_test_epi16_mask(context, _mm512_set1_epi16(128));
        const __mmask32 upper = _mm512_test_epi16_mask(context, _mm512_set1_epi16(256));
        const __m512i low = pick_words(words, word, second), high = pick_words(words + 4, word, second);
        store_entries(_mm512_mask_blend_epi16(upper, low, high), context, tables + i);
    }
    return i;
}

// Holds a map of 256 entries in four registers.
SHRINKPOINT_AVX512 size_t look_up_bytes_avx512(const uint8_t* map, const uint8_t* contexts, size_t count,
                                               uint8_t* tables) {
    __m512i words[4];
    for (unsigned k = 0; k < 4; ++k) words[k] = _mm512_loadu_si512(map + 64 * k);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts + i));
        const __m512i context = _mm512_cvtepu8_epi16(bytes);
        const __m512i word = _mm512_srli_epi16(context, 1);
        const __mmask32 second = _mm512_test_epi16_mask(context, _mm512_set1_epi16(128));
        store_entries(pick_words(words, word, second), context, tables + i);
    }
    return i;
}

// Looks up sixteen entries of the map at a time: `rows` of them hold what is not the last entry. A sum that leaves seven
// bits gives zero, and only bytes of this row stay within.
SHRINKPOINT_AVX2 size_t look_up_bytes_avx2(const uint8_t* map, size_t rows, uint8_t last, const uint8_t* contexts,
                                           size_t count, uint8_t* tables) {
    const __m256i bias = _mm256_set1_epi8(0x70), most = _mm256_set1_epi8(static_cast<char>(last));
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts + i));
        const __m256i context = _mm256_min_epu8(bytes, most);
        __m256i found = _mm256_setzero_si256();
        for (size_t row = 0; row < rows; ++row) {
            const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(map + 16 * row));
            const __m256i place = _mm256_xor_si256(context, _mm256_set1_epi8(static_cast<char>(16 * row)));
            const __m256i entry =
                _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), _mm256_adds_epu8(place, bias));
            found = _mm256_or_si256(found, entry);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tables + i), found);
    }
    return i;
}

}  // namespace
#endif

void look_up(const uint8_t* map, size_t size, const uint16_t* contexts, size_t count, uint8_t* tables) {
    size_t i = 0;
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx512) {
        uint8_t padded[kMaxContexts] = {};
        std::memcpy(padded, map, size);
        i = look_up_avx512(padded, contexts, count, tables);
    }
#else
    (void)size;
#endif
    for (; i < count; ++i) tables[i] = map[contexts[i]];
}

void look_up_bytes(const uint8_t* map, size_t size, const uint8_t* contexts, size_t count, uint8_t* tables) {
    uint8_t whole[256];
    const size_t rows = (size + 15) / 16, filled = rows == 1 ? 16 : 256;
    std::memcpy(whole, map, size);
    std::fill(whole + size, whole + filled, map[size - 1]);
    size_t i = 0;
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx2 || (simd() == Simd::Avx512 && rows == 1))
        i = look_up_bytes_avx2(whole, rows, static_cast<uint8_t>(size - 1), contexts, count, tables);
    else if (simd() == Simd::Avx512)
        i = look_up_bytes_avx512(whole, contexts, count, tables);
#endif
    for (; i < count && rows == 1; ++i) tables[i] = whole[std::min<size_t>(contexts[i], size - 1)];
    for (; i < count; ++i) tables[i] = whole[contexts[i]];
}

}  // namespace shrinkpoint
