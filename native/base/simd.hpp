// Compiles one source for several instruction sets and picks one at run time, by what the processor has.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define SHRINKPOINT_X86 1
#define SHRINKPOINT_AVX2 __attribute__((target("avx2,bmi,bmi2,fma,popcnt")))
#define SHRINKPOINT_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512cd,avx2,bmi,bmi2,fma,popcnt")))
#endif

#if defined(__GNUC__)
#define SHRINKPOINT_INLINE __attribute__((always_inline)) inline
#else
#define SHRINKPOINT_INLINE inline
#endif

#if defined(SHRINKPOINT_X86)
#define SHRINKPOINT_INLINE256 SHRINKPOINT_AVX2 SHRINKPOINT_INLINE
#define SHRINKPOINT_INLINE512 SHRINKPOINT_AVX512 SHRINKPOINT_INLINE
#endif

namespace shrinkpoint {

enum class Simd : int { None = 0, Avx2 = 1, Avx512 = 2 };

// The widest instruction set to use. All of them give the same bytes; tests/native/test_simd.py and `make fuzz` compare
// them.
Simd simd();

// Uses nothing wider than `most` from now on, in all threads. For tests.
void limit_simd(Simd most);

}  // namespace shrinkpoint

// Defines a function that is compiled once for each instruction set and picks one when called:
//    SHRINKPOINT_KERNEL(void, scale, (float* x, size_t n), (x, n)) { for (...) ... }
// The last argument repeats the names of the parameters. native/README.md, "Kernels", says what a kernel may not do.
#if defined(SHRINKPOINT_X86)
#define SHRINKPOINT_KERNEL(result, name, parameters, arguments)                                 \
    SHRINKPOINT_INLINE result name##_body parameters;                                           \
    static result name##_plain parameters { return name##_body arguments; }                     \
    SHRINKPOINT_AVX2 static result name##_avx2 parameters { return name##_body arguments; }     \
    SHRINKPOINT_AVX512 static result name##_avx512 parameters { return name##_body arguments; } \
    result name parameters {                                                                    \
        const Simd level = simd();                                                              \
        if (level == Simd::Avx512) return name##_avx512 arguments;                              \
        if (level == Simd::Avx2) return name##_avx2 arguments;                                  \
        return name##_plain arguments;                                                          \
    }                                                                                           \
    SHRINKPOINT_INLINE result name##_body parameters
#else
#define SHRINKPOINT_KERNEL(result, name, parameters, arguments) result name parameters
#endif
