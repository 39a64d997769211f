#include "entropy/bit_fields.hpp"

#include <algorithm>

#include "base/simd.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#endif

namespace shrinkpoint {

namespace {

#if defined(SHRINKPOINT_X86)

// Eight fields of one width end at the bit of a byte where they began. So a group of eight fills whole bytes, and the
// places within it are loop constants.
constexpr size_t kGroup = 8;

// Up to this width four fields and the bits before them fit in 16 bytes, each field with its leading bits in four.
constexpr unsigned kShuffledBits = 25;

// The shuffle and the shifts that spread four fields over four 32-bit words, the first field at bit `place` of 16
// bytes.
struct Spread {
    alignas(16) uint8_t bytes[16];
    alignas(16) uint32_t shifts[4];
    Spread(unsigned place, unsigned width) {
        for (unsigned j = 0; j < 4; ++j) {
            const unsigned bit = place + j * width;
            for (unsigned b = 0; b < 4; ++b) bytes[4 * j + b] = static_cast<uint8_t>((bit >> 3) + b);
            shifts[j] = bit & 7;
        }
    }
};

SHRINKPOINT_AVX2 SHRINKPOINT_INLINE __m256i pair(const void* a, const void* b) {
    return _mm256_loadu2_m128i(static_cast<const __m128i*>(b), static_cast<const __m128i*>(a));
}

// Loads groups as long as 16 bytes can be read from the start of a half group. Returns the fields loaded.
SHRINKPOINT_AVX2 size_t load_groups(const BitSpan& span, uint64_t position, unsigned width, size_t count,
                                    uint32_t* fields) {
    const auto place = static_cast<unsigned>(position & 7);
    const unsigned middle = place + 4 * width;  // where the second half of a group begins
    const Spread low(place, width), high(middle & 7, width);
    const __m256i shuffle = pair(low.bytes, high.bytes), shifts = pair(low.shifts, high.shifts);
    const __m256i mask = _mm256_set1_epi32(static_cast<int>((1u << width) - 1));
    const uint8_t* input = span.data + (position >> 3);
    const ptrdiff_t reach = static_cast<ptrdiff_t>(middle >> 3) + 16;
    size_t i = 0;
    for (; i + kGroup <= count && span.end - input >= reach; i += kGroup, input += width) {
        const __m256i bytes = _mm256_shuffle_epi8(pair(input, input + (middle >> 3)), shuffle);
        const __m256i words = _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), mask);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(fields + i), words);
    }
    return i;
}

#endif

template <typename Word>
void load_uniform(const BitSpan& span, uint64_t position, unsigned width, size_t count, Word* fields) {
    if (width == 0) {
        std::fill_n(fields, count, Word{0});
        return;
    }
    size_t i = 0;
#if defined(SHRINKPOINT_X86)
    if constexpr (sizeof(Word) == 4)
        if (width <= kShuffledBits && simd() >= Simd::Avx2) i = load_groups(span, position, width, count, fields);
#endif
    for (; i < count; ++i) fields[i] = static_cast<Word>(load_bits_wide(span.data, position + i * width, width));
}

SHRINKPOINT_KERNEL(void, load_mixed,
                   (const uint8_t* data, uint64_t position, const uint8_t* widths, size_t count, uint32_t* fields),
                   (data, position, widths, count, fields)) {
    uint8_t widest = 0;
    for (size_t i = 0; i < count; ++i) widest = widths[i] > widest ? widths[i] : widest;
    size_t i = 0;
    // Two fields from one word if any two fit beside the bits before them.
    for (; widest <= 28 && i + 2 <= count; i += 2) {
        const unsigned first = widths[i], second = widths[i + 1];
        uint64_t word;
        std::memcpy(&word, data + (position >> 3), 8);
        word >>= position & 7;
        fields[i] = static_cast<uint32_t>(word & ((uint64_t{1} << first) - 1));
        fields[i + 1] = static_cast<uint32_t>((word >> first) & ((uint64_t{1} << second) - 1));
        position += first + second;
    }
    for (; i < count; ++i) {
        const unsigned width = widths[i];
        fields[i] = static_cast<uint32_t>(load_bits(data, position, width));
        position += width;
    }
}

SHRINKPOINT_KERNEL(void, store_mixed,
                   (const uint32_t* fields, const uint8_t* widths, size_t count, BitWriter& writer),
                   (fields, widths, count, writer)) {
    BitWriter bits = writer;  // a copy whose address is not taken stays in registers
    size_t i = 0;
    // Two fields at once if both fit: the writer's state is a chain of dependent steps.
    for (; i + 2 <= count; i += 2) {
        const unsigned first = widths[i], both = first + widths[i + 1];
        if (both <= 56) {
            bits.put(fields[i] | static_cast<uint64_t>(fields[i + 1]) << first, both);
        } else {
            bits.put(fields[i], first);
            bits.put(fields[i + 1], both - first);
        }
    }
    if (i < count) bits.put(fields[i], widths[i]);
    writer = bits;
}

void store_uniform(const uint32_t* fields, unsigned width, size_t count, BitWriter& writer) {
    if (width == 0) return;
    size_t i = 0;
#if defined(SHRINKPOINT_X86)
    if (width >= 4 && width <= 28 && simd() >= Simd::Avx2) {
        i = count / kGroup * kGroup;
        writer.put_groups(fields, count / kGroup, width);
    }
#endif
    BitWriter bits = writer;
    for (; i < count; ++i) bits.put(fields[i], width);
    writer = bits;
}

}  // namespace

#if defined(SHRINKPOINT_X86)
SHRINKPOINT_AVX2 void BitWriter::put_groups(const uint32_t* fields, size_t groups, unsigned bits) {
    if (groups == 0) return;
    alignas(32) uint64_t shifts[4];  // of each pair of fields: bits into its first byte
    size_t offsets[4];               // and that byte
    for (unsigned k = 0; k < 4; ++k) {
        const unsigned bit = filled_ + 2 * bits * k;
        shifts[k] = bit & 7, offsets[k] = bit >> 3;
    }
    const __m256i shift = _mm256_load_si256(reinterpret_cast<const __m256i*>(shifts));
    const __m256i back = _mm256_sub_epi64(_mm256_set1_epi64x(2 * bits), shift);
    const __m128i width = _mm_cvtsi32_si128(static_cast<int>(bits));
    const __m256i even = _mm256_set1_epi64x(0xffffffff);
    // The pair before each pair: its last bits go where the first byte is shared.
    __m256i last = _mm256_set1_epi64x(static_cast<int64_t>(buffer_ << (2 * bits - filled_)));
    uint8_t* out = out_;
    for (size_t g = 0; g < groups; ++g, fields += kGroup, out += bits) {
        const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fields));
        const __m256i odd = _mm256_sll_epi64(_mm256_srli_epi64(eight, 32), width);
        const __m256i pairs = _mm256_or_si256(_mm256_and_si256(eight, even), odd);
        const __m256i turned = _mm256_permute4x64_epi64(pairs, 0x93);
        const __m256i previous = _mm256_blend_epi32(turned, last, 3);
        const __m256i words = _mm256_or_si256(_mm256_sllv_epi64(pairs, shift), _mm256_srlv_epi64(previous, back));
        last = turned;
        const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
        const int64_t four[4] = {_mm_cvtsi128_si64(low), _mm_extract_epi64(low, 1), _mm_cvtsi128_si64(high),
                                 _mm_extract_epi64(high, 1)};
        for (unsigned k = 0; k < 4; ++k) std::memcpy(out + offsets[k], &four[k], 8);  // in this order: they overlap
    }
    out_ = out;
    const auto final = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(last)));
    buffer_ = final >> (2 * bits - filled_);
}
#endif

void store_fields(const uint32_t* fields, const uint8_t* widths, uint8_t uniform, size_t count, BitWriter& bits) {
    if (uniform != kMixedWidths)
        store_uniform(fields, uniform, count, bits);
    else
        store_mixed(fields, widths, count, bits);
}

void store_fields(const uint64_t* fields, const uint8_t* widths, uint8_t uniform, size_t count, BitWriter& bits) {
    BitWriter writer = bits;
    for (size_t i = 0; i < count; ++i) writer.put_wide(fields[i], uniform != kMixedWidths ? uniform : widths[i]);
    bits = writer;
}

void load_fields(const BitSpan& span, uint64_t position, const uint8_t* widths, uint8_t uniform, size_t count,
                 uint32_t* fields) {
    if (uniform != kMixedWidths)
        load_uniform(span, position, uniform, count, fields);
    else
        load_mixed(span.data, position, widths, count, fields);
}

void load_fields(const BitSpan& span, uint64_t position, const uint8_t* widths, uint8_t uniform, size_t count,
                 uint64_t* fields) {
    if (uniform != kMixedWidths) return load_uniform(span, position, uniform, count, fields);
    for (size_t i = 0; i < count; ++i) {
        fields[i] = load_bits_wide(span.data, position, widths[i]);
        position += widths[i];
    }
}

}  // namespace shrinkpoint
