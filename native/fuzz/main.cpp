// Feeds the native core with streams as its encoders write them, and malformed. `make fuzz` builds it with
// sanitizers:
//   fuzz SECONDS SEED            cases until the time is over
//   fuzz SECONDS SEED CASE       this case alone, as a failure names it
//   fuzz TARGET FILE [FILE...]   what libFuzzer has found, one input a file
// `make libfuzzer` builds it for libFuzzer (-DSHRINKPOINT_LIBFUZZER): the input makes the choices, and the variable
// SHRINKPOINT_FUZZ names the target.
#include <cfenv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#if __has_include(<sanitizer/common_interface_defs.h>)
#include <sanitizer/common_interface_defs.h>
#define SHRINKPOINT_SANITIZER 1
#endif

#include "base/simd.hpp"
#include "fuzz/cases.hpp"
#include "fuzz/checks.hpp"

namespace shrinkpoint {

// Replaces the pool, which returns more memory than asked for: here an overrun of one byte is an error.
void* pool_take(size_t size) { return ::operator new(size); }
void pool_give(void* block) noexcept { ::operator delete(block); }

namespace {

uint64_t seed_now = 0, case_now = 0;

void name_case() {
    std::fprintf(stderr, "fuzz: seed %llu, case %llu\n", static_cast<unsigned long long>(seed_now),
                 static_cast<unsigned long long>(case_now));
}

}  // namespace

void expect(bool holds, const char* message) {
    if (holds) return;
    std::fprintf(stderr, "fuzz: %s\n", message);
    name_case();
    std::abort();
}

Bytes same_everywhere(const std::function<Bytes(unsigned)>& make) {
    const Simd before = simd();
    const Bytes first = make(1);
    for (const Simd level : {Simd::None, Simd::Avx2, Simd::Avx512}) {
        limit_simd(level);
        expect(make(level == Simd::Avx2 ? 3 : 1) == first, "instruction sets or threads differ");
    }
    limit_simd(before);
    return first;
}

Bytes same_under_any_rounding(const std::function<Bytes(unsigned)>& make) {
    const Bytes out = same_everywhere(make);
    std::fesetround(FE_DOWNWARD);
    const Bytes rounded_down = make(1);
    std::fesetround(FE_TONEAREST);
    expect(rounded_down == out, "the caller's rounding changes the result");
    return out;
}

namespace {

// Targets of bit packing, entropy coders and grids.
void fuzz_codes(Choices& choose) {
    switch (choose.below(7)) {
        case 0: return fuzz_tables(choose);
        case 1: return fuzz_rans(choose);
        case 2: return fuzz_bits(choose);
        case 3: return fuzz_classes(choose);
        case 4: return fuzz_lengths(choose);
        case 5: return fuzz_kmeans(choose);
        default: return fuzz_cyclic(choose);
    }
}

// Targets of the wire.
void fuzz_wire(Choices& choose) {
    switch (choose.below(7)) {
        case 0: return fuzz_uniform(choose);
        case 1: return fuzz_planes(choose);
        case 2: return fuzz_normal(choose);
        case 3: return fuzz_blockfloat(choose);
        case 4: return fuzz_rotation(choose);
        case 5: return fuzz_indices(choose);
        default: return fuzz_largest(choose);
    }
}

struct Target {
    const char* name;
    void (*run)(Choices&);
};
constexpr Target kTargets[] = {
    {"chunks", fuzz_chunks}, {"codes", fuzz_codes}, {"lattice", fuzz_lattice}, {"wire", fuzz_wire}};

const Target* target_of(const char* name) {
    for (const Target& target : kTargets)
        if (name != nullptr && std::strcmp(target.name, name) == 0) return &target;
    return nullptr;
}

void run(const Target& target, Choices& choose) {
    limit_simd(static_cast<Simd>(choose.below(3)));
    try {
        target.run(choose);
    } catch (const std::exception& error) {
        expect(false, error.what());
    }
}

}  // namespace

}  // namespace shrinkpoint

using namespace shrinkpoint;

#if defined(SHRINKPOINT_LIBFUZZER)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Target* const target = target_of(std::getenv("SHRINKPOINT_FUZZ"));
    expect(target != nullptr, "SHRINKPOINT_FUZZ names none of chunks, codes, lattice, wire");
    Choices choose(data, size);
    run(*target, choose);
    return 0;
}

#else

namespace {

int replay(const Target& target, int count, char** paths) {
    for (int i = 0; i < count; ++i) {
        std::ifstream file(paths[i], std::ios::binary);
        expect(file.good(), "an input that cannot be read");
        const Bytes input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        Choices choose(input.data(), input.size());
        run(target, choose);
    }
    std::printf("%s: %d inputs\n", target.name, count);
    return 0;
}

}  // namespace

int main(int count, char** words) {
    if (const Target* target = count > 2 ? target_of(words[1]) : nullptr) return replay(*target, count - 2, words + 2);
    const double seconds = count > 1 ? std::atof(words[1]) : 10;
    seed_now = count > 2 ? std::strtoull(words[2], nullptr, 10) : 1;
    const bool alone = count > 3;
    if (alone) case_now = std::strtoull(words[3], nullptr, 10);
#if defined(SHRINKPOINT_SANITIZER)
    __sanitizer_set_death_callback(name_case);
#endif
    const auto start = std::chrono::steady_clock::now();
    const auto over = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= seconds; };
    uint64_t cases = 0;
    do {
        Choices choose(seed_now, case_now);
        const unsigned kind = choose.below(20);
        run(kTargets[kind < 7 ? 0 : kind < 12 ? 1 : kind < 14 ? 2 : 3], choose);
        ++cases, ++case_now;
    } while (!alone && !over());
    std::printf("seed %llu: %llu cases; mutants: %llu refused, %llu decoded, %llu impossible\n",
                static_cast<unsigned long long>(seed_now), static_cast<unsigned long long>(cases),
                static_cast<unsigned long long>(tally.refused), static_cast<unsigned long long>(tally.accepted),
                static_cast<unsigned long long>(tally.impossible));
    return 0;
}

#endif
