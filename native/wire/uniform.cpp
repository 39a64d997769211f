#include "wire/uniform.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/bits.hpp"
#include "base/parallel.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kBlock = 4096;                  // codes that are made before they are packed; a multiple of tiles
constexpr size_t kPiece = 2 * kBlock;            // values that are read twice while they are in the first cache
constexpr size_t kLargePiece = size_t{1} << 16;  // values that a thread takes where they are read from memory twice
constexpr float kLeastStep = 0x1p-120f;
constexpr uint32_t kLowHalf = 0xffff;

// Maps float bits to integers in the order of the floats, for which vectors have a minimum whatever the values are. A
// nan is beyond infinity, of either sign. Its own inverse.
SHRINKPOINT_INLINE int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

SHRINKPOINT_INLINE float number_of(int32_t key) { return float_of(static_cast<uint32_t>(ordered(key))); }

struct Extent {
    int32_t least = std::numeric_limits<int32_t>::max(), most = std::numeric_limits<int32_t>::min();
    void widen(const Extent& other) {
        least = std::min(least, other.least), most = std::max(most, other.most);
    }
};

struct Range {
    float lo, step;
};

SHRINKPOINT_INLINE Extent extent_of(const float* values, size_t count) {
    int32_t least = Extent{}.least, most = Extent{}.most;
    for (size_t i = 0; i < count; ++i) {
        const int32_t key = ordered(static_cast<int32_t>(bits_of(values[i])));
        least = std::min(least, key), most = std::max(most, key);
    }
    return {least, most};
}

SHRINKPOINT_INLINE bool finite(float value) { return std::fabs(value) <= std::numeric_limits<float>::max(); }

// Rounds to bfloat16 towards minus infinity.
SHRINKPOINT_INLINE float rounded_down(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t away = bits >> 31 & static_cast<uint32_t>((bits & kLowHalf) != 0);
    return float_of((bits & ~kLowHalf) + (away << 16));
}

// Rounds to bfloat16 away from zero.
SHRINKPOINT_INLINE float rounded_up(float value) {
    return float_of((bits_of(value) + kLowHalf) & ~kLowHalf);
}

SHRINKPOINT_INLINE Range range_of(const UniformWire& layout, const Extent& extent) {
    const float least = number_of(extent.least) + 0.0f, most = number_of(extent.most);
    const float levels = static_cast<float>((1u << layout.bits) - 1), spare = layout.dithered ? 0.5f : 0.0f;
    const float lo = layout.brief ? rounded_down(least) : least;
    float step = (most - lo) / levels;
    if (layout.brief) step = rounded_up(step);
    if (step < kLeastStep) step = 0.0f;
    const float first = lo - step * spare, last = lo + step * (levels + spare);
    if (finite(most - least) && finite(first) && finite(last)) return {lo, step};
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
}

// Stores a number of a range as float32, or as bfloat16, its upper half.
SHRINKPOINT_INLINE void put_number(bool brief, float value, size_t place, uint8_t* data) {
    if (brief) {
        const auto half = static_cast<uint16_t>(bits_of(value) >> 16);
        std::memcpy(data + 2 * place, &half, 2);
    } else {
        std::memcpy(data + 4 * place, &value, 4);
    }
}

SHRINKPOINT_INLINE float number_at(bool brief, const uint8_t* data, size_t place) {
    uint32_t bits = 0;
    if (brief) {
        uint16_t half;
        std::memcpy(&half, data + 2 * place, 2);
        bits = uint32_t{half} << 16;
    } else {
        std::memcpy(&bits, data + 4 * place, 4);
    }
    return float_of(bits);
}

SHRINKPOINT_INLINE void put_range(const UniformWire& layout, size_t run, const Range& range, size_t runs,
                                  uint8_t* wire) {
    put_number(layout.brief, range.lo, run, wire);
    put_number(layout.brief, range.step, runs + run, wire);
}

SHRINKPOINT_INLINE Range range_at(const UniformWire& layout, const uint8_t* wire, size_t run, size_t runs) {
    return {number_at(layout.brief, wire, run), number_at(layout.brief, wire, runs + run)};
}

// Writes the ranges of the runs [first, last), whose values begin at `values`.
template <bool sixty_four>
SHRINKPOINT_INLINE void put_ranges_of(const UniformWire& layout, const float* values, size_t first, size_t last,
                                      uint8_t* wire) {
    const size_t runs = layout.runs();
    for (size_t run = first; run < last; ++run) {
        const size_t start = run * layout.size, count = sixty_four ? 64 : std::min(layout.size, layout.count - start);
        put_range(layout, run, range_of(layout, extent_of(values, count)), runs, wire);
        values += count;
    }
}

SHRINKPOINT_KERNEL(void, put_ranges, (const UniformWire& layout, const float* values, size_t first, size_t last,
                                      uint8_t* wire),
                   (layout, values, first, last, wire)) {
    const size_t whole = layout.size == 64 ? std::min(last, layout.count / 64) : first;
    put_ranges_of<true>(layout, values, first, whole, wire);
    put_ranges_of<false>(layout, values + (whole - first) * layout.size, whole, last, wire);
}

SHRINKPOINT_KERNEL(Extent, extent, (const float* values, size_t count), (values, count)) {
    return extent_of(values, count);
}

// Calls visit(run, place, count) for the parts of runs in [start, start + count).
template <typename Visit>
SHRINKPOINT_INLINE void by_runs(size_t size, size_t start, size_t count, Visit visit) {
    size_t run = start / size, inside = start % size;
    for (size_t done = 0; done < count; ++run, inside = 0) {
        const size_t here = std::min(size - inside, count - done);
        visit(run, done, here);
        done += here;
    }
}

template <typename Noise>
SHRINKPOINT_INLINE void codes_of(const float* values, size_t count, const Range& range, int32_t most, Noise noise,
                                 uint8_t* codes) {
    if (std::isnan(range.lo)) {
        std::memset(codes, 0, count);
        return;
    }
    const float lo = range.lo, inverse = range.step > 0 ? 1 / range.step : 0.0f;
    for (size_t i = 0; i < count; ++i) {
        const float at = (values[i] - lo) * inverse + (noise(i) + 0.5f);  // not negative: lo is not above the values
        codes[i] = static_cast<uint8_t>(std::min(static_cast<int32_t>(at), most));
    }
}

// Writes the codes of a block [start, start + count), padded with zeros to a whole tile; `start` is the first position
// of a tile.
SHRINKPOINT_KERNEL(void, put_block,
                   (const UniformWire& layout, const float* values, size_t start, size_t count, const float* noise,
                    uint8_t* wire),
                   (layout, values, start, count, noise, wire)) {
    alignas(64) uint8_t codes[kBlock];
    const size_t runs = layout.runs(), tiles = wire_tiles(count);
    const int32_t most = (1 << layout.bits) - 1;
    by_runs(layout.size, start, count, [&](size_t run, size_t place, size_t here) {
        const Range range = range_at(layout, wire, run, runs);
        const float* from = values + place;
        if (noise != nullptr)
            codes_of(from, here, range, most, [&](size_t i) { return noise[place + i]; }, codes + place);
        else if (here == 64)
            codes_of(from, 64, range, most, [](size_t) { return 0.0f; }, codes + place);
        else
            codes_of(from, here, range, most, [](size_t) { return 0.0f; }, codes + place);
    });
    std::memset(codes + count, 0, tiles * kWireTile - count);
    pack_tiles(codes, tiles, layout.bits, wire + layout.head(), start / kWireTile, wire_tiles(layout.count));
}

template <typename Noise>
SHRINKPOINT_INLINE void values_of(const uint8_t* codes, size_t count, const Range& range, Noise noise, float* values) {
    const float lo = range.lo, step = range.step;
    for (size_t i = 0; i < count; ++i) values[i] = lo + (static_cast<float>(codes[i]) - noise(i)) * step;
}

SHRINKPOINT_KERNEL(void, take_block,
                   (const UniformWire& layout, const uint8_t* wire, size_t start, size_t count, const float* noise,
                    float* values),
                   (layout, wire, start, count, noise, values)) {
    alignas(64) uint8_t codes[kBlock];
    const size_t runs = layout.runs();
    unpack_tiles(wire + layout.head(), start / kWireTile, wire_tiles(layout.count), layout.bits, codes, wire_tiles(count));
    by_runs(layout.size, start, count, [&](size_t run, size_t place, size_t here) {
        const Range range = range_at(layout, wire, run, runs);
        float* to = values + place;
        if (noise != nullptr)
            values_of(codes + place, here, range, [&](size_t i) { return noise[place + i]; }, to);
        else if (here == 64)
            values_of(codes + place, 64, range, [](size_t) { return 0.0f; }, to);
        else
            values_of(codes + place, here, range, [](size_t) { return 0.0f; }, to);
    });
}

// Calls work(start, count, noise) for the blocks of [first, last).
template <typename Work>
void by_blocks(const UniformWire& layout, size_t first, size_t last, Work work) {
    alignas(64) float noise[kBlock];
    for (size_t start = first; start < last; start += kBlock) {
        const size_t count = std::min(kBlock, last - start);
        if (layout.dithered) fill_dithers(layout.seed, start, count, noise);
        work(start, count, layout.dithered ? noise : nullptr);
    }
}

// Writes the codes of [first, last), whose values begin at `values`.
void put_codes(const UniformWire& layout, const float* values, size_t first, size_t last, uint8_t* wire) {
    by_blocks(layout, first, last, [&](size_t start, size_t count, const float* noise) {
        put_block(layout, values + (start - first), start, count, noise, wire);
    });
}

// Writes the ranges of long runs, each of which several threads read.
void put_long_ranges(const UniformWire& layout, const WireSource& values, uint8_t* wire, unsigned threads) {
    const size_t size = std::min(layout.size, layout.count), pieces = (size + kLargePiece - 1) / kLargePiece;
    const size_t runs = layout.runs();
    std::vector<Extent> extents(pieces * runs);
    parallel(extents.size(), threads, [&](WorkQueue& indices) {
        FloatPiece buffer(values.brief() ? kLargePiece : 0);
        for (size_t index; indices.take(index);) {
            const size_t inside = index % pieces * kLargePiece, start = index / pieces * size + inside;
            if (start >= layout.count) continue;
            const size_t count = std::min({kLargePiece, size - inside, layout.count - start});
            extents[index] = extent(values.piece(start, count, buffer.data()), count);
        }
    });
    for (size_t run = 0; run < runs; ++run) {
        Extent whole;
        for (size_t i = 0; i < pieces; ++i) whole.widen(extents[run * pieces + i]);
        put_range(layout, run, range_of(layout, whole), runs, wire);
    }
}

// Returns a number of values near `wanted` that is whole runs and whole tiles; 0 if there is none that is small.
size_t whole_piece(size_t size, size_t wanted) {
    if (size > kLargePiece) return 0;
    const size_t least = std::lcm(size, kWireTile);
    return least > kLargePiece ? 0 : least * std::max<size_t>(1, wanted / least);
}

}  // namespace

SHRINKPOINT_KERNEL(void, pack_planes, (const uint8_t* codes, size_t count, unsigned bits, uint8_t* planes),
                   (codes, count, bits, planes)) {
    const size_t whole = count / kWireTile, tiles = wire_tiles(count);
    pack_tiles(codes, whole, bits, planes, 0, tiles);
    if (whole == tiles) return;
    uint8_t rest[kWireTile] = {};
    std::memcpy(rest, codes + whole * kWireTile, count % kWireTile);
    pack_tiles(rest, 1, bits, planes, whole, tiles);
}

SHRINKPOINT_KERNEL(void, unpack_planes, (const uint8_t* planes, size_t count, unsigned bits, uint8_t* codes),
                   (planes, count, bits, codes)) {
    const size_t whole = count / kWireTile, tiles = wire_tiles(count);
    unpack_tiles(planes, 0, tiles, bits, codes, whole);
    if (whole == tiles) return;
    uint8_t rest[kWireTile];
    unpack_tiles(planes, whole, tiles, bits, rest, 1);
    std::memcpy(codes + whole * kWireTile, rest, count % kWireTile);
}

void uniform_encode(const UniformWire& layout, const WireSource& values, uint8_t* wire, unsigned threads) {
    const size_t whole = whole_piece(layout.size, kPiece), piece = whole != 0 ? whole : kLargePiece;
    if (whole == 0) put_long_ranges(layout, values, wire, threads);
    parallel((layout.count + piece - 1) / piece, threads, [&](WorkQueue& indices) {
        FloatPiece buffer(values.brief() ? piece : 0);
        for (size_t index; indices.take(index);) {
            const size_t first = index * piece, last = std::min(layout.count, first + piece);
            const float* from = values.piece(first, last - first, buffer.data());
            if (whole != 0) put_ranges(layout, from, first / layout.size, (last + layout.size - 1) / layout.size, wire);
            put_codes(layout, from, first, last, wire);
        }
    });
}

void uniform_decode(const UniformWire& layout, const uint8_t* wire, const WireTarget& values, unsigned threads) {
    parallel((layout.count + kLargePiece - 1) / kLargePiece, threads, [&](WorkQueue& indices) {
        alignas(64) float buffer[kBlock];
        for (size_t index; indices.take(index);) {
            const size_t first = index * kLargePiece, last = std::min(layout.count, first + kLargePiece);
            by_blocks(layout, first, last, [&](size_t start, size_t count, const float* noise) {
                take_block(layout, wire, start, count, noise, values.piece(start, buffer));
                values.put(start, count, buffer);
            });
        }
    });
}

}  // namespace shrinkpoint
