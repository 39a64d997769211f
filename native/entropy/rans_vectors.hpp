// Rounds of 32 lanes in vectors: sixteen lanes a register of AVX-512, eight of AVX2.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "base/simd.hpp"
#include "entropy/rans.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#endif

namespace shrinkpoint {

#if defined(SHRINKPOINT_X86)

// Loads base[index] for four 16-bit indices. Plain loads: on most machines the gather instruction is slower (microcode
// on some, slowed down against side channels on others).
SHRINKPOINT_INLINE256 __m128i load4(uint64_t indices, const uint32_t* base) {
    __m128i out = _mm_cvtsi32_si128(static_cast<int>(base[indices & 0xffff]));
    out = _mm_insert_epi32(out, static_cast<int>(base[indices >> 16 & 0xffff]), 1);
    out = _mm_insert_epi32(out, static_cast<int>(base[indices >> 32 & 0xffff]), 2);
    return _mm_insert_epi32(out, static_cast<int>(base[indices >> 48]), 3);
}

// Without tables no place is computed: arithmetic on a null pointer is undefined.
template <bool ContextTables>
SHRINKPOINT_INLINE const uint8_t* from(const uint8_t* tables, size_t i) {
    return ContextTables ? tables + i : nullptr;
}

// A stream being decoded.
struct DecodeRun {
    const uint8_t* tables;  // null if every symbol is under the first table
    uint8_t* symbols;
    const uint8_t* next;
    const uint8_t* end;
    uint32_t* states;
};

// Decodes as many whole rounds as can be read without looking past `end`. Returns the symbols done and moves `next`.
// `pauses` is kept between the calls of one stream.
size_t decode_rounds_avx2(DecodeRun& run, size_t count, const DecoderTables& tables, Pauses& pauses);
size_t decode_rounds_avx512(DecodeRun& run, size_t count, const DecoderTables& tables, Pauses& pauses);

// Decodes rounds of two streams in turn: a round waits only for the round before it in its own stream. Both streams
// have tables or neither has.
size_t decode_rounds_avx2(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables, Pauses& pauses);
size_t decode_rounds_avx512(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables, Pauses& pauses);

// How symbols are looked up: whole rounds of the first symbol, the ends of the first symbols' slots, or every slot.
enum class LookUp { First, Ends, Slots };
template <LookUp Kind>
using LookUpKind = std::integral_constant<LookUp, Kind>;

// Calls decode(kind, misses) with the fastest look-up of which the streams have not shown that it mostly misses. A step
// of `Ends` decodes `lanes` symbols.
template <typename Decode>
size_t by_likely_symbols(size_t streams, size_t lanes, const DecoderTables& tables, Pauses& pauses, Decode decode) {
    constexpr unsigned kPause = 63;
    const auto attempt = [&](auto kind, unsigned& pause, size_t symbols_per_miss) {
        size_t misses = 0;
        const size_t done = decode(kind, misses);
        if (misses > streams * done / symbols_per_miss) pause = kPause;
        return done;
    };
    if (tables.rare && pauses.by_first == 0)
        return attempt(LookUpKind<LookUp::First>(), pauses.by_first, 4 * kMaxLanes);
    pauses.by_first -= pauses.by_first > 0;
    if (tables.few && pauses.by_ends == 0) return attempt(LookUpKind<LookUp::Ends>(), pauses.by_ends, 2 * lanes);
    pauses.by_ends -= pauses.by_ends > 0;
    size_t misses = 0;
    return decode(LookUpKind<LookUp::Slots>(), misses);
}

// Tables of an encoder in the layouts that the vector look-ups of this processor need.
class PackedTables {
   public:
    explicit PackedTables(const std::vector<Frequencies>& tables);

    static constexpr size_t kRegisterEntries = 64;  // entries that fit in the registers of AVX-512

    // AVX-512. The index of a symbol under a table: table << symbol_bits | symbol.
    unsigned symbol_bits = 0;
    std::vector<uint32_t> entries;   // frequency | cumulative << 16
    std::vector<float> reciprocals;  // 1 / frequency, rounded down; empty for more entries than registers hold

    // AVX2. Entries as above, and 2^32 / frequency, rounded down, in the upper half; of table << 8 | symbol.
    std::vector<uint64_t> with_reciprocals;

   private:
    void fill_entries(const std::vector<Frequencies>& tables);
};

// Encodes symbols[0, count), last first; count is a multiple of 32. Writes words in front of `next` and overwrites up
// to 32 bytes there. `tables` may be null as above.
void encode_rounds_avx2(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                        uint32_t* states, uint8_t*& next);
void encode_rounds_avx512(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                          uint32_t* states, uint8_t*& next);

#else
class PackedTables {};
#endif

}  // namespace shrinkpoint
