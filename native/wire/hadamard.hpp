// Multiplies values by Hadamard's matrix in place, in the order of comm/compressors/hadamard.py. For kernels.
#pragma once
#include "base/bits.hpp"
#include "wire/reductions.hpp"

namespace shrinkpoint {

// Sums and differences of neighbours `apart` < 8 places apart, in 8 values.
#if defined(__GNUC__)
using Eight = float __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));

template <int stride>
SHRINKPOINT_INLINE void near_step(float* x) {
    constexpr auto low = [](int i) { return i & ~stride; };
    constexpr auto high = [](int i) { return i | stride; };
    constexpr auto sign = [](int i) { return i & stride ? INT32_MIN : 0; };
    Eight all;
    std::memcpy(&all, x, sizeof all);
#if defined(__clang__)
    const Eight a = __builtin_shufflevector(all, all, low(0), low(1), low(2), low(3), low(4), low(5), low(6), low(7));
    const Eight b =
        __builtin_shufflevector(all, all, high(0), high(1), high(2), high(3), high(4), high(5), high(6), high(7));
#else
    const Eight a = __builtin_shuffle(all, Words{low(0), low(1), low(2), low(3), low(4), low(5), low(6), low(7)});
    const Eight b =
        __builtin_shuffle(all, Words{high(0), high(1), high(2), high(3), high(4), high(5), high(6), high(7)});
#endif
    const Words flips{sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7)};
    all = a + reinterpret_cast<Eight>(reinterpret_cast<Words>(b) ^ flips);
    std::memcpy(x, &all, sizeof all);
}
#else
template <int stride>
SHRINKPOINT_INLINE void near_step(float* x) {
    for (int i = 0; i < 8; ++i) {
        if (i & stride) continue;
        const float a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
    }
}
#endif

// Multiplies by Hadamard's matrix over sqrt(n).
template <size_t size>
SHRINKPOINT_INLINE void hadamard_transform(float* x) {
    constexpr float scale = size == 16 ? 0.25f : size == 64 ? 0.125f : 0.0625f;
    for (size_t i = 0; i < size; ++i) x[i] *= scale;  // first: sums are not beyond float32 then
    for (size_t i = 0; i < size; i += 8) near_step<1>(x + i), near_step<2>(x + i), near_step<4>(x + i);
#pragma GCC unroll 8
    for (size_t stride = 8; stride < size; stride *= 2)
        for (size_t i = 0; i < size; i += 2 * stride)
            for (size_t k = i; k < i + stride; k += 8) {
                float sums[8], differences[8];
                for (size_t j = 0; j < 8; ++j) sums[j] = x[k + j] + x[k + stride + j];
                for (size_t j = 0; j < 8; ++j) differences[j] = x[k + j] - x[k + stride + j];
                std::memcpy(x + k, sums, sizeof sums);
                std::memcpy(x + k + stride, differences, sizeof differences);
            }
    for (size_t i = 0; i < size; ++i) x[i] = x[i] != x[i] ? float_of(0x7FC00000) : x[i];
}

}  // namespace shrinkpoint
