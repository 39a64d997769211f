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

// Same with a look-up for the eighths of octaves, or its root. Returns the positions done.
template <bool kRoot>
SHRINKPOINT_AVX512 size_t make_powers_avx512(const int16_t* codes, const int32_t* exponents, int32_t step, size_t count,
                                             float* values) {
    static const Bits16 table_bits = kRoot ? roots_of_two_octaves() : eighths_twice();
    const __m512i table = _mm512_loadu_si512(table_bits.data());
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
    if (simd() == Simd::Avx512) done = make_powers_avx512<kRoot>(codes, exponents, step, count, values);
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
