#include "lattice_powers.hpp"

#include "lattice_cells.hpp"
#include "simd.hpp"

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
// The same with a look-up for the eighths of octaves. Returns the positions done.
SHRINKPOINT_AVX512 size_t make_powers_avx512(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count,
                                             float* values) {
    const __m512i eighths = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(kEighths)));
    const __m512i steps = _mm512_set1_epi32(step), zero_code = _mm512_set1_epi32(kZeroCode);
    const __m512i least = _mm512_set1_epi32(kMinOctave), most = _mm512_set1_epi32(kMaxOctave);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i code = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
        // A product of 16-bit halves, the upper ones with 0: steps are below 2^15.
        const __m512i exponent = _mm512_add_epi32(_mm512_loadu_si512(exponents + i), _mm512_madd_epi16(code, steps));
        const __m512i octave = _mm512_min_epi32(_mm512_max_epi32(_mm512_srai_epi32(exponent, 3), least), most);
        const __m512i eighth = _mm512_permutexvar_epi32(exponent, eighths);
        const __mmask16 is_power = _mm512_cmpneq_epi32_mask(code, zero_code);
        _mm512_storeu_si512(values + i, _mm512_maskz_add_epi32(is_power, eighth, _mm512_slli_epi32(octave, 23)));
    }
    return i;
}
#endif

}  // namespace

void make_powers(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count, float* values) {
    size_t done = 0;
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx512) done = make_powers_avx512(codes, exponents, step, count, values);
#endif
    make_some_powers(codes + done, exponents + done, step, count - done, values + done);
}

}  // namespace shrinkpoint
