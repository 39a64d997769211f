#include "lattice/powers.hpp"

#include <array>
#include <cmath>

#include "base/bits.hpp"
#include "base/simd.hpp"
#include "lattice/cells.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#endif

namespace shrinkpoint {

namespace {

SHRINKPOINT_KERNEL(void, make_some_powers,
                   (const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* values),
                   (codes, exponents, step, count, values)) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = power(exponents[i] + step * codes[i]);
        values[i] = float_of(codes[i] == kZeroCode ? 0 : bits);
    }
}

#if defined(SHRINKPOINT_X86)
using Bits16 = std::array<uint32_t, 16>;

// The bits of 2^(k / 8) for k below 8, twice.
Bits16 eighths_twice() {
    Bits16 out;
    for (size_t k = 0; k < 16; ++k) out[k] = kEighths[k % 8];
    return out;
}

// The bits of the roots of 2^(k / 8) for k below 8, then of twice these. The root of a power of two with an even
// exponent times one of them is exactly the power's own root times one of these.
Bits16 roots_of_two_octaves() {
    Bits16 out;
    for (size_t k = 0; k < 16; ++k) out[k] = bits_of(std::sqrt(float_of(kEighths[k % 8]) * (k < 8 ? 1.0f : 2.0f)));
    return out;
}

template <bool kRoot>
const Bits16& factors() {
    static const Bits16 bits = kRoot ? roots_of_two_octaves() : eighths_twice();
    return bits;
}

// Same with a look-up for the eighths of octaves, or its root. Returns the positions done.
template <bool kRoot>
SHRINKPOINT_AVX512 size_t make_powers_avx512(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count,
                                             float* values) {
    const __m512i table = _mm512_loadu_si512(factors<kRoot>().data());
    const __m512i steps = _mm512_set1_epi32(step), zero_code = _mm512_set1_epi32(kZeroCode);
    const __m512i least = _mm512_set1_epi32(kMinOctave), most = _mm512_set1_epi32(kMaxOctave);
    const __m512i odd = _mm512_set1_epi32(8), even = _mm512_set1_epi32(~1);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i code = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
        // Multiplies 16-bit halves, the upper halves by 0: steps are below 2^15.
        const __m512i exponent = _mm512_add_epi32(_mm512_loadu_si512(exponents + i), _mm512_madd_epi16(code, steps));
        const __m512i octave = _mm512_min_epi32(_mm512_max_epi32(_mm512_srai_epi32(exponent, 3), least), most);
        const __mmask16 is_power = _mm512_cmpneq_epi32_mask(code, zero_code);
        __m512i place = exponent, scale = _mm512_slli_epi32(octave, 23);
        if (kRoot) {  // three bits of the exponent, and above them one of the octave as it is bounded
            place = _mm512_ternarylogic_epi32(odd, _mm512_slli_epi32(octave, 3), exponent, 0xca);
            scale = _mm512_slli_epi32(_mm512_and_si512(octave, even), 22);
        }
        const __m512i factor = _mm512_permutexvar_epi32(place, table);
        _mm512_storeu_si512(values + i, _mm512_maskz_add_epi32(is_power, factor, scale));
    }
    return i;
}

// Eight at a time, so that an odd octave has a look-up of its own.
template <bool kRoot>
SHRINKPOINT_AVX2 size_t make_powers_avx2(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count,
                                         float* values) {
    const auto load = [](const uint32_t* bits) { return reinterpret_cast<const __m256i*>(bits); };
    const __m256i even_table = _mm256_loadu_si256(load(factors<kRoot>().data()));
    const __m256i odd_table = _mm256_loadu_si256(load(factors<kRoot>().data() + 8));
    const __m256i steps = _mm256_set1_epi32(step), zero_code = _mm256_set1_epi32(kZeroCode);
    const __m256i least = _mm256_set1_epi32(kMinOctave), most = _mm256_set1_epi32(kMaxOctave);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i code = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        const __m256i place = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponents + i));
        const __m256i exponent = _mm256_add_epi32(place, _mm256_madd_epi16(code, steps));
        const __m256i octave = _mm256_min_epi32(_mm256_max_epi32(_mm256_srai_epi32(exponent, 3), least), most);
        __m256i factor = _mm256_permutevar8x32_epi32(even_table, exponent), scale = _mm256_slli_epi32(octave, 23);
        if (kRoot) {
            const __m256i odd = _mm256_permutevar8x32_epi32(odd_table, exponent);
            const __m256i is_odd = _mm256_cmpgt_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(octave, 31));
            factor = _mm256_blendv_epi8(factor, odd, is_odd);
            scale = _mm256_slli_epi32(_mm256_srai_epi32(octave, 1), 23);
        }
        const __m256i bits = _mm256_andnot_si256(_mm256_cmpeq_epi32(code, zero_code), _mm256_add_epi32(factor, scale));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i), bits);
    }
    return i;
}
#endif

}  // namespace

SHRINKPOINT_KERNEL(void, take_roots, (const float* squares, size_t count, float* roots), (squares, count, roots)) {
    for (size_t i = 0; i < count; ++i) roots[i] = std::sqrt(squares[i]);
}

namespace {

// Returns the number of values whose roots are done.
template <bool kRoot>
size_t make_with(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* values) {
    size_t done = 0;
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx512)
        done = make_powers_avx512<kRoot>(codes, exponents, step, count, values);
    else if (simd() == Simd::Avx2)
        done = make_powers_avx2<kRoot>(codes, exponents, step, count, values);
#endif
    make_some_powers(codes + done, exponents + done, step, count - done, values + done);
    return done;
}

}  // namespace

void make_powers(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* values) {
    make_with<false>(codes, exponents, step, count, values);
}

void make_power_roots(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* roots) {
    const size_t done = make_with<true>(codes, exponents, step, count, roots);
    take_roots(roots + done, count - done, roots + done);
}

}  // namespace shrinkpoint
