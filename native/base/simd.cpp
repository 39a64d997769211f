#include "base/simd.hpp"

#include <atomic>

#if defined(SHRINKPOINT_X86)
#include <cpuid.h>
#endif

namespace shrinkpoint {

namespace {

#if defined(SHRINKPOINT_X86)
bool all_of(unsigned bits, unsigned of) { return (bits & of) == of; }

// The register states that the operating system saves for a process (XCR0).
unsigned saved_states() {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Asks the processor instead of __builtin_cpu_supports, which answers no to everything where a compiler's runtime
// leaves its table empty (zig's).
int widest() {
    unsigned a, b, c, d;
    constexpr unsigned fma = 1u << 12, popcnt = 1u << 23, osxsave = 1u << 27, avx = 1u << 28;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !all_of(c, fma | popcnt | osxsave | avx)) return 0;
    const unsigned saved = saved_states();
    constexpr unsigned ymm = 0x06, zmm = 0xe0;
    constexpr unsigned bmi = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8;
    if (!all_of(saved, ymm) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !all_of(b, bmi | avx2 | bmi2)) return 0;
    constexpr unsigned f = 1u << 16, dq = 1u << 17, cd = 1u << 28, bw = 1u << 30, vl = 1u << 31;
    return all_of(saved, zmm) && all_of(b, f | dq | cd | bw | vl) ? 2 : 1;
}
#else
int widest() { return 0; }
#endif

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
