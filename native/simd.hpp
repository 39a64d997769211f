// One source, several instruction sets: the loader picks the widest clone the machine can run.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define SHRINKPOINT_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define SHRINKPOINT_CLONES
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define SHRINKPOINT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,popcnt")))
namespace shrinkpoint {
inline bool has_avx512() {
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl");
    return has;
}
}  // namespace shrinkpoint
#endif
