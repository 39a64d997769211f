#include "rans_avx512.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>

namespace shrinkpoint {

namespace {

#define INLINE512 SHRINKPOINT_AVX512 ALWAYS_INLINE

// base[index] of four 16-bit indices.
INLINE512 __m128i load4(uint64_t indices, const uint32_t* base) {
    __m128i out = _mm_cvtsi32_si128(static_cast<int>(base[indices & 0xffff]));
    out = _mm_insert_epi32(out, static_cast<int>(base[indices >> 16 & 0xffff]), 1);
    out = _mm_insert_epi32(out, static_cast<int>(base[indices >> 32 & 0xffff]), 2);
    return _mm_insert_epi32(out, static_cast<int>(base[indices >> 48]), 3);
}

// base[index] of sixteen indices below 2^16. Plain loads: the gather instruction is slower than they are on most
// machines (it is microcode on some, and slowed down against side channels on others).
INLINE512 __m512i load16(__m512i indices, const uint32_t* base) {
    const __m256i narrow = _mm512_cvtepi32_epi16(indices);
    const __m128i low = _mm256_castsi256_si128(narrow), high = _mm256_extracti128_si256(narrow, 1);
    const auto a = static_cast<uint64_t>(_mm_cvtsi128_si64(low)), b = static_cast<uint64_t>(_mm_extract_epi64(low, 1));
    const auto c = static_cast<uint64_t>(_mm_cvtsi128_si64(high)), d = static_cast<uint64_t>(_mm_extract_epi64(high, 1));
    const __m256i ab = _mm256_inserti128_si256(_mm256_castsi128_si256(load4(a, base)), load4(b, base), 1);
    const __m256i cd = _mm256_inserti128_si256(_mm256_castsi128_si256(load4(c, base)), load4(d, base), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(ab), cd, 1);
}

INLINE512 __m512i bytes16(const uint8_t* bytes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Where there are no tables there is no place among them either: arithmetic on a null pointer is undefined.
template <bool ContextTables>
INLINE512 const uint8_t* from(const uint8_t* tables, size_t i) {
    return ContextTables ? tables + i : nullptr;
}

// One renormalised step of sixteen lanes.
template <bool ContextTables>
INLINE512 __m512i get16(__m512i states, const uint8_t* tables, const uint32_t* entries, uint8_t* symbols,
                        const uint8_t*& next) {
    __m512i index = _mm512_and_si512(states, _mm512_set1_epi32(kProbabilityScale - 1));
    if (ContextTables) index = _mm512_or_si512(_mm512_slli_epi32(bytes16(tables), kProbabilityBits), index);
    const __m512i entry = load16(index, entries);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm512_cvtepi32_epi8(entry));
    const __m512i less_one = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xfff));
    const __m512i high = _mm512_srli_epi32(states, kProbabilityBits);
    const __m512i bias = _mm512_add_epi32(high, _mm512_srli_epi32(entry, 20));
    const __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(less_one, high), bias);
    const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(kRansLow));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
    next += 2 * __builtin_popcount(low);
    return _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(low, words));
}

// A round takes at most 64 bytes and looks at 32 more.
constexpr ptrdiff_t kReach = 2 * kMaxLanes + 32;

template <bool ContextTables>
SHRINKPOINT_AVX512 size_t decode_one(DecodeRun& run, size_t count, const uint32_t* entries) {
    __m512i first = _mm512_loadu_si512(run.states), second = _mm512_loadu_si512(run.states + 16);
    const uint8_t* at = run.next;
    size_t i = 0;
    for (; i + kMaxLanes <= count && run.end - at >= kReach; i += kMaxLanes) {
        first = get16<ContextTables>(first, from<ContextTables>(run.tables, i), entries, run.symbols + i, at);
        second = get16<ContextTables>(second, from<ContextTables>(run.tables, i + 16), entries, run.symbols + i + 16, at);
    }
    run.next = at;
    _mm512_storeu_si512(run.states, first);
    _mm512_storeu_si512(run.states + 16, second);
    return i;
}

template <bool ContextTables>
SHRINKPOINT_AVX512 size_t decode_two(DecodeRun& a, DecodeRun& b, size_t count, const uint32_t* entries) {
    __m512i a1 = _mm512_loadu_si512(a.states), a2 = _mm512_loadu_si512(a.states + 16);
    __m512i b1 = _mm512_loadu_si512(b.states), b2 = _mm512_loadu_si512(b.states + 16);
    const uint8_t *at = a.next, *bt = b.next;
    size_t i = 0;
    for (; i + kMaxLanes <= count && a.end - at >= kReach && b.end - bt >= kReach; i += kMaxLanes) {
        a1 = get16<ContextTables>(a1, from<ContextTables>(a.tables, i), entries, a.symbols + i, at);
        b1 = get16<ContextTables>(b1, from<ContextTables>(b.tables, i), entries, b.symbols + i, bt);
        a2 = get16<ContextTables>(a2, from<ContextTables>(a.tables, i + 16), entries, a.symbols + i + 16, at);
        b2 = get16<ContextTables>(b2, from<ContextTables>(b.tables, i + 16), entries, b.symbols + i + 16, bt);
    }
    a.next = at, b.next = bt;
    _mm512_storeu_si512(a.states, a1);
    _mm512_storeu_si512(a.states + 16, a2);
    _mm512_storeu_si512(b.states, b1);
    _mm512_storeu_si512(b.states + 16, b2);
    return i;
}

// Lane k's number.
INLINE512 __m256i iota16() { return _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// states / frequency and the rest, exactly. The float quotient is off by one at most, as states < frequency * 2^20;
// the rest tells in which direction.
INLINE512 __m512i divided(__m512i x, __m512i frequency, __m512i& rest) {
    const __m512 divisor = _mm512_cvtepi32_ps(frequency);
    const __m512 rough = _mm512_rcp14_ps(divisor);
    const __m512 reciprocal = _mm512_mul_ps(rough, _mm512_fnmadd_ps(rough, divisor, _mm512_set1_ps(2)));
    __m512i quotient = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(x), reciprocal));
    rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, frequency));
    const __mmask16 above = _mm512_movepi32_mask(rest);
    rest = _mm512_mask_add_epi32(rest, above, rest, frequency);
    quotient = _mm512_mask_sub_epi32(quotient, above, quotient, _mm512_set1_epi32(1));
    const __mmask16 below = _mm512_cmpge_epi32_mask(rest, frequency);
    rest = _mm512_mask_sub_epi32(rest, below, rest, frequency);
    return _mm512_mask_add_epi32(quotient, below, quotient, _mm512_set1_epi32(1));
}

// Sixteen lanes take one symbol each; the words they emit go in front of `next`.
template <bool ContextTables>
INLINE512 __m512i put16(__m512i states, const uint8_t* symbols, const uint8_t* tables, const PackedTable* packed,
                        uint8_t*& next) {
    __m512i index = bytes16(symbols);
    if (ContextTables) index = _mm512_or_si512(_mm512_slli_epi32(bytes16(tables), 8), index);
    const __m512i entry = load16(index, packed->data());
    const __m512i frequency = _mm512_and_si512(entry, _mm512_set1_epi32(0xffff));
    const __mmask16 emit = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(states, 20), frequency);
    const auto emitted = static_cast<unsigned>(__builtin_popcount(emit));
    // The words are turned to the end of the register, so that a whole one can be stored: masked stores are slow.
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(emit, states));
    const __m256i turn = _mm256_add_epi16(iota16(), _mm256_set1_epi16(static_cast<int16_t>(emitted)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(next - 32), _mm256_permutexvar_epi16(turn, words));
    next -= 2 * emitted;
    __m512i rest;
    const __m512i quotient = divided(_mm512_mask_srli_epi32(states, emit, states, 16), frequency, rest);
    const __m512i offset = _mm512_add_epi32(rest, _mm512_srli_epi32(entry, 16));
    return _mm512_add_epi32(_mm512_slli_epi32(quotient, kProbabilityBits), offset);
}

template <bool ContextTables>
SHRINKPOINT_AVX512 void encode_all(const uint8_t* symbols, const uint8_t* tables, size_t count,
                                   const PackedTable* packed, uint32_t* states, uint8_t*& next) {
    __m512i first = _mm512_loadu_si512(states), second = _mm512_loadu_si512(states + 16);
    uint8_t* at = next;
    for (size_t i = count; i > 0;) {
        i -= kMaxLanes;
        second = put16<ContextTables>(second, symbols + i + 16, from<ContextTables>(tables, i + 16), packed, at);
        first = put16<ContextTables>(first, symbols + i, from<ContextTables>(tables, i), packed, at);
    }
    next = at;
    _mm512_storeu_si512(states, first);
    _mm512_storeu_si512(states + 16, second);
}

}  // namespace

size_t decode_rounds_avx512(DecodeRun& run, size_t count, const uint32_t* entries) {
    return run.tables != nullptr ? decode_one<true>(run, count, entries) : decode_one<false>(run, count, entries);
}

size_t decode_rounds_avx512(DecodeRun& a, DecodeRun& b, size_t count, const uint32_t* entries) {
    return a.tables != nullptr ? decode_two<true>(a, b, count, entries) : decode_two<false>(a, b, count, entries);
}

void encode_rounds_avx512(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTable* packed,
                          uint32_t* states, uint8_t*& next) {
    if (tables != nullptr)
        encode_all<true>(symbols, tables, count, packed, states, next);
    else
        encode_all<false>(symbols, tables, count, packed, states, next);
}

}  // namespace shrinkpoint
#endif
