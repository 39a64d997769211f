#include "simd.hpp"

#include <atomic>

namespace shrinkpoint {

namespace {

int widest() {
#if defined(SHRINKPOINT_X86)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("popcnt");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512cd");
    return v4 ? 2 : v3 ? 1 : 0;
#else
    return 0;
#endif
}

std::atomic<int>& level() {
    static std::atomic<int> value{widest()};
    return value;
}

}  // namespace

Simd simd() { return static_cast<Simd>(level().load(std::memory_order_relaxed)); }

void limit_simd(Simd most) {
    const int widest_here = widest(), wanted = static_cast<int>(most);
    level() = wanted < widest_here ? wanted : widest_here;
}

}  // namespace shrinkpoint
