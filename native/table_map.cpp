#include "table_map.hpp"

#include <algorithm>
#include <cstring>

#include "model.hpp"
#include "simd.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#endif

namespace shrinkpoint {

#if defined(SHRINKPOINT_X86)
namespace {

// The whole map in eight registers, two entries a 16-bit word. Returns the positions done.
SHRINKPOINT_AVX512 size_t look_up_avx512(const uint8_t* map, const uint16_t* contexts, size_t count,
                                         uint8_t* tables) {
    __m512i words[8];
    for (unsigned k = 0; k < 8; ++k) words[k] = _mm512_loadu_si512(map + 64 * k);
    const __m512i one = _mm512_set1_epi16(1), low_byte = _mm512_set1_epi16(255);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i context = _mm512_loadu_si512(contexts + i);
        const __m512i word = _mm512_srli_epi16(context, 1);
        const __mmask32 second = _mm512_test_epi16_mask(context, _mm512_set1_epi16(128));
        const __mmask32 upper = _mm512_test_epi16_mask(context, _mm512_set1_epi16(256));
        __m512i low = _mm512_permutex2var_epi16(words[0], word, words[1]);
        low = _mm512_mask_blend_epi16(second, low, _mm512_permutex2var_epi16(words[2], word, words[3]));
        __m512i high = _mm512_permutex2var_epi16(words[4], word, words[5]);
        high = _mm512_mask_blend_epi16(second, high, _mm512_permutex2var_epi16(words[6], word, words[7]));
        const __m512i both = _mm512_mask_blend_epi16(upper, low, high);
        const __m512i shift = _mm512_slli_epi16(_mm512_and_si512(context, one), 3);
        const __m512i byte = _mm512_and_si512(_mm512_srlv_epi16(both, shift), low_byte);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tables + i), _mm512_cvtepi16_epi8(byte));
    }
    return i;
}

// A map of 256 entries in four registers.
SHRINKPOINT_AVX512 size_t look_up_bytes_avx512(const uint8_t* map, const uint8_t* contexts, size_t count,
                                               uint8_t* tables) {
    __m512i words[4];
    for (unsigned k = 0; k < 4; ++k) words[k] = _mm512_loadu_si512(map + 64 * k);
    const __m512i odd = _mm512_set1_epi16(1), upper_half = _mm512_set1_epi16(128);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts + i));
        const __m512i context = _mm512_cvtepu8_epi16(bytes);
        const __m512i word = _mm512_srli_epi16(context, 1);
        const __mmask32 upper = _mm512_test_epi16_mask(context, upper_half);
        __m512i both = _mm512_permutex2var_epi16(words[0], word, words[1]);
        both = _mm512_mask_blend_epi16(upper, both, _mm512_permutex2var_epi16(words[2], word, words[3]));
        both = _mm512_mask_srli_epi16(both, _mm512_test_epi16_mask(context, odd), both, 8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tables + i), _mm512_cvtepi16_epi8(both));
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
    std::memcpy(whole, map, size);
    std::fill(whole + size, whole + 256, map[size - 1]);
    size_t i = 0;
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx512) i = look_up_bytes_avx512(whole, contexts, count, tables);
#endif
    for (; i < count; ++i) tables[i] = whole[contexts[i]];
}

}  // namespace shrinkpoint
