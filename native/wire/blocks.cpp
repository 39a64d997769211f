#include "wire/blocks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/bits.hpp"
#include "base/parallel.hpp"
#include "wire/hadamard.hpp"
#include "wire/normal_float.hpp"
#include "wire/normal_float_avx512.hpp"
#include "wire/reductions.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kSpan = 4096;  // values that are worked on at a time: whole groups, whole tiles
static_assert(kSpan % kMaxGroup == 0 && kSpan % kWireTile == 0);

// Calls work(first, count, buffer) for all spans of `count` values.
template <typename Work>
void by_spans(size_t count, unsigned threads, Work work) {
    const size_t spans = (count + kSpan - 1) / kSpan;
    parallel(spans, threads, [&](WorkQueue& indices) {
        alignas(64) float buffer[kSpan];
        for (size_t i; indices.take(i);) work(i * kSpan, std::min(kSpan, count - i * kSpan), buffer);
    });
}

// Calls work(first, count, values) for all spans of a tensor.
template <typename Work>
void by_spans_of(const WireSource& values, size_t count, unsigned threads, Work work) {
    by_spans(count, threads, [&](size_t first, size_t here, float* buffer) {
        work(first, here, values.piece(first, here, buffer));
    });
}

// Calls work(first, count, values), which fills all spans of a tensor.
template <typename Work>
void by_spans_of(const WireTarget& values, size_t count, unsigned threads, Work work) {
    by_spans(count, threads, [&](size_t first, size_t here, float* buffer) {
        work(first, here, values.piece(first, buffer));
        values.put(first, here, buffer);
    });
}

}  // namespace

// --- levels of a normal distribution

namespace {

// Calls apply(levels) with the levels of `bits` bits.
template <typename Apply>
SHRINKPOINT_INLINE void with_levels(const NormalWire& layout, Apply apply) {
    if (layout.bits == 1) apply(Levels<1>(layout.centers));
    if (layout.bits == 2) apply(Levels<2>(layout.centers));
    if (layout.bits == 3) apply(Levels<4>(layout.centers));
    if (layout.bits == 4) apply(Levels<8>(layout.centers));
}

SHRINKPOINT_KERNEL(void, encode_normal_span,
                   (const NormalWire& layout, const float* values, size_t first, size_t count, uint8_t* wire),
                   (layout, values, first, count, wire)) {
    alignas(64) float copy[kSpan];
    alignas(64) uint8_t codes[kSpan];
    const float* from = filled_up(values, count, std::max(layout.group, kWireTile), copy);
    const size_t tiles = wire_tiles(count), whole = (count + layout.group - 1) / layout.group * layout.group;
    if (whole < tiles * kWireTile) std::memset(codes + whole, 0, tiles * kWireTile - whole);
    with_levels(layout, [&](const auto& levels) __attribute__((always_inline)) {
        levels.encode_span(layout, from, first, whole, codes, wire + 2 * (first / layout.group));
    });
    pack_tiles(codes, tiles, layout.bits, wire + layout.head(), first / kWireTile, wire_tiles(layout.count));
}

SHRINKPOINT_KERNEL(void, decode_normal_span,
                   (const NormalWire& layout, const uint8_t* wire, size_t first, size_t count, float* values),
                   (layout, wire, first, count, values)) {
    alignas(64) uint8_t codes[kSpan];
    unpack_tiles(wire + layout.head(), first / kWireTile, wire_tiles(layout.count), layout.bits, codes, wire_tiles(count));
    with_levels(layout, [&](const auto& levels) __attribute__((always_inline)) {
        levels.decode_span(layout, wire + 2 * (first / layout.group), count, codes, values);
    });
}

#if defined(SHRINKPOINT_X86)

// Encodes whole groups of 64.
SHRINKPOINT_AVX512 void encode_usual_span(const NormalWire& layout, const LevelCells& cells, const float* values,
                                          size_t first, size_t count, uint8_t* wire) {
    alignas(64) uint8_t codes[kSpan];
    const LevelLookup lookup(cells);
    uint8_t* scales = wire + 2 * (first / kUsualGroup);
    for (size_t start = 0; start < count; start += kUsualGroup) {
        const uint16_t scale = lookup.encode(values + start, codes + start);
        *scales++ = static_cast<uint8_t>(scale);
        *scales++ = static_cast<uint8_t>(scale >> 8);
    }
    pack_tiles(codes, count / kWireTile, layout.bits, wire + layout.head(), first / kWireTile, wire_tiles(layout.count));
}

#endif

}  // namespace

void normal_encode(const NormalWire& layout, const WireSource& values, uint8_t* wire, unsigned threads) {
#if defined(SHRINKPOINT_X86)
    const LevelCells cells(layout);
    const bool by_look_up = simd() == Simd::Avx512 && layout.group == kUsualGroup && layout.bits > 1 && cells.usable;
#endif
    by_spans_of(values, layout.count, threads, [&](size_t first, size_t count, const float* from) {
#if defined(SHRINKPOINT_X86)
        if (by_look_up && count % kUsualGroup == 0)
            return encode_usual_span(layout, cells, from, first, count, wire);
#endif
        encode_normal_span(layout, from, first, count, wire);
    });
}

void normal_decode(const NormalWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads) {
    by_spans_of(values, layout.count, threads, [&](size_t first, size_t count, float* to) {
        decode_normal_span(layout, wire, first, count, to);
    });
}

// --- blocks of small floats

namespace {

constexpr uint32_t kNanBlock = 255, kLeastExponent = 16;
constexpr float kRounder = 0x1.8p23f;  // added to a small number, it leaves an integer in the low bits of the sum

struct Mantissas {
    unsigned bits;
    float most;

    SHRINKPOINT_INLINE explicit Mantissas(unsigned of_bits)
        : bits(of_bits), most(static_cast<float>((1u << (of_bits - 1)) - 1)) {}

    SHRINKPOINT_INLINE float step(uint32_t exponent) const {
        if (exponent == kNanBlock) return std::numeric_limits<float>::quiet_NaN();
        return exponent == 0 ? 0.0f : float_of((exponent - (bits - 2)) << 23);
    }

    // The nearest integer within reach, plus kRounder.
    SHRINKPOINT_INLINE float near(float at) const {
        at = at < -most ? -most : at;
        return (at > most ? most : at) + kRounder;
    }

    SHRINKPOINT_INLINE float error(const float* values, size_t count, float inverse, float parts,
                                   float* __restrict scratch) const {
        for (size_t i = 0; i < count; ++i) {
            const float at = values[i] * inverse * parts, off = at - (near(at) - kRounder);
            scratch[i] = off * off;
        }
        return halved(scratch, count);
    }

    SHRINKPOINT_INLINE uint8_t encode(const float* values, size_t count, uint8_t* __restrict out) const {
        const uint32_t exponent = largest(values, count) >> 23;
        if (exponent == kNanBlock || exponent < kLeastExponent) {
            std::memset(out, 0, count);
            return static_cast<uint8_t>(exponent == kNanBlock ? kNanBlock : 0);
        }
        float scratch[kMaxGroup];
        const float inverse = 1 / step(exponent), coarse = error(values, count, inverse, 1, scratch);
        const bool finer = error(values, count, inverse, 2, scratch) * 0.25f < coarse;
        const float parts = finer ? 2.0f : 1.0f;
        const uint32_t mask = (1u << bits) - 1;
        for (size_t i = 0; i < count; ++i)
            out[i] = static_cast<uint8_t>(bits_of(near(values[i] * inverse * parts)) & mask);
        return static_cast<uint8_t>(exponent - finer);
    }

    SHRINKPOINT_INLINE void decode(const uint8_t* codes, size_t count, uint32_t exponent, float* __restrict out) const {
        const float by = step(exponent);
        const int32_t high = 1 << (bits - 1);
        for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>((codes[i] ^ high) - high) * by;
    }
};

SHRINKPOINT_KERNEL(void, encode_block_span,
                   (const BlockWire& layout, const float* values, size_t first, size_t count, uint8_t* wire),
                   (layout, values, first, count, wire)) {
    alignas(64) float copy[kSpan];
    alignas(64) uint8_t codes[kSpan];
    const Mantissas mantissas(layout.bits);
    const float* from = filled_up(values, count, std::max(layout.block, kWireTile), copy);
    const size_t tiles = wire_tiles(count), whole = (count + layout.block - 1) / layout.block * layout.block;
    if (whole < tiles * kWireTile) std::memset(codes + whole, 0, tiles * kWireTile - whole);
    for (size_t start = 0; start < whole; start += layout.block)
        wire[(first + start) / layout.block] = mantissas.encode(from + start, layout.block, codes + start);
    pack_tiles(codes, tiles, layout.bits, wire + layout.head(), first / kWireTile, wire_tiles(layout.count));
}

SHRINKPOINT_KERNEL(void, decode_block_span,
                   (const BlockWire& layout, const uint8_t* wire, size_t first, size_t count, float* values),
                   (layout, wire, first, count, values)) {
    alignas(64) uint8_t codes[kSpan];
    const Mantissas mantissas(layout.bits);
    unpack_tiles(wire + layout.head(), first / kWireTile, wire_tiles(layout.count), layout.bits, codes, wire_tiles(count));
    for (size_t start = 0; start < count; start += layout.block)
        mantissas.decode(codes + start, std::min(layout.block, count - start), wire[(first + start) / layout.block],
                         values + start);
}

}  // namespace

void blockfloat_encode(const BlockWire& layout, const WireSource& values, uint8_t* wire, unsigned threads) {
    by_spans_of(values, layout.count, threads, [&](size_t first, size_t count, const float* from) {
        encode_block_span(layout, from, first, count, wire);
    });
}

void blockfloat_decode(const BlockWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads) {
    by_spans_of(values, layout.count, threads, [&](size_t first, size_t count, float* to) {
        decode_block_span(layout, wire, first, count, to);
    });
}

// --- rotations

namespace {

template <size_t size>
SHRINKPOINT_INLINE bool outlying(const float* x, float limit) {
    float sizes[size];
    for (size_t i = 0; i < size; ++i) sizes[i] = std::fabs(x[i]);
    return float_of(largest(x, size)) > halved(sizes, size) * limit;
}

template <size_t size>
SHRINKPOINT_INLINE void rotate_span(const Rotation& layout, const float* values, size_t first, size_t count,
                                    float* turned, uint8_t* flags) {
    for (size_t start = first; start < first + count; start += size) {
        alignas(64) float x[size], copy[size];
        const float* from = filled_up(values + (start - first), std::min(size, first + count - start), size, copy);
        const bool turn = flags == nullptr || outlying<size>(from, layout.limit);
        if (flags != nullptr) flags[start / size] = turn;
        if (!turn) {
            std::memcpy(turned + start, from, sizeof x);
            continue;
        }
        for (size_t i = 0; i < size; ++i) x[i] = from[i] * layout.signs[i];
        hadamard_transform<size>(x);
        std::memcpy(turned + start, x, sizeof x);
    }
}

template <size_t size>
SHRINKPOINT_INLINE void rotate_span_back(const Rotation& layout, const float* turned, const uint8_t* flags,
                                         size_t first, size_t count, float* values) {
    for (size_t start = first; start < first + count; start += size) {
        alignas(64) float x[size];
        std::memcpy(x, turned + start, sizeof x);
        if (flags == nullptr || flags[start / size] != 0) {
            hadamard_transform<size>(x);
            for (size_t i = 0; i < size; ++i) x[i] *= layout.signs[i];
        }
        std::memcpy(values + (start - first), x, 4 * std::min(size, first + count - start));
    }
}

SHRINKPOINT_KERNEL(void, rotate_some,
                   (const Rotation& layout, const float* values, size_t first, size_t count, float* turned,
                    uint8_t* flags),
                   (layout, values, first, count, turned, flags)) {
    if (layout.block == 16) rotate_span<16>(layout, values, first, count, turned, flags);
    if (layout.block == 64) rotate_span<64>(layout, values, first, count, turned, flags);
    if (layout.block == 256) rotate_span<256>(layout, values, first, count, turned, flags);
}

SHRINKPOINT_KERNEL(void, rotate_some_back,
                   (const Rotation& layout, const float* turned, const uint8_t* flags, size_t first, size_t count,
                    float* values),
                   (layout, turned, flags, first, count, values)) {
    if (layout.block == 16) rotate_span_back<16>(layout, turned, flags, first, count, values);
    if (layout.block == 64) rotate_span_back<64>(layout, turned, flags, first, count, values);
    if (layout.block == 256) rotate_span_back<256>(layout, turned, flags, first, count, values);
}

}  // namespace

void rotate(const Rotation& layout, const WireSource& values, float* turned, uint8_t* flags, unsigned threads) {
    by_spans_of(values, layout.count, threads, [&](size_t first, size_t count, const float* from) {
        rotate_some(layout, from, first, count, turned, flags);
    });
}

void rotate_back(const Rotation& layout, const float* turned, const uint8_t* flags, const WireTarget& values,
                 unsigned threads) {
    by_spans_of(values, layout.count, threads, [&](size_t first, size_t count, float* to) {
        rotate_some_back(layout, turned, flags, first, count, to);
    });
}

}  // namespace shrinkpoint
