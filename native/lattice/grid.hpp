// Places of a lattice's points, by the law of codec/lattice.py: every operation is one rounding of float32.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/simd.hpp"

namespace shrinkpoint {

constexpr int32_t kStepsPerOctave = 8;       // exponents are in eighths of an octave
constexpr int32_t kStepClasses = 8;  // classes of step sizes in contexts, half an octave each
constexpr uint32_t kEighths[kStepsPerOctave] = {0x3f800000, 0x3f8b95c2, 0x3f9837f0, 0x3fa5fed7,
                                        0x3fb504f3, 0x3fc5672a, 0x3fd744fd, 0x3feac0c7};  // 2^(k / 8)

constexpr int32_t kMinOctave = -126, kMaxOctave = 127;  // octaves of normal numbers

// kEighths[k] for k below 8 without a look-up, so that loops become vectors.
SHRINKPOINT_INLINE uint32_t eighth(uint32_t k) {
    const uint32_t low = 0 - (k & 1), middle = 0 - (k >> 1 & 1), high = 0 - (k >> 2);
    const auto chosen = [](uint32_t which, uint32_t a, uint32_t b) { return a ^ (which & (a ^ b)); };
    const uint32_t a = chosen(low, kEighths[0], kEighths[1]), b = chosen(low, kEighths[2], kEighths[3]);
    const uint32_t c = chosen(low, kEighths[4], kEighths[5]), d = chosen(low, kEighths[6], kEighths[7]);
    return chosen(high, chosen(middle, a, b), chosen(middle, c, d));
}

// Whole octaves of an exponent, limited to the normal numbers.
SHRINKPOINT_INLINE int32_t octave_of(int32_t exponent) {
    return std::min(std::max(exponent >> 3, kMinOctave), kMaxOctave);
}

// The bits of 2^(exponent / 8). power(-40) = 0x3d000000, the bits of 2^-5.
SHRINKPOINT_INLINE uint32_t power(int32_t exponent) {
    const auto part = static_cast<uint32_t>(exponent & (kStepsPerOctave - 1));
    return eighth(part) + (static_cast<uint32_t>(octave_of(exponent)) << 23);
}

// A borrowed array of codes of 2 bytes or of 1; null if there is none.
struct Codes {
    const uint8_t* data = nullptr;
    unsigned bytes = 2;
};

// The lattice of a tensor, seen as a matrix of `rows` times `columns`, given by the exponents of its steps. With
// `powers`, points stand for powers of two, `step` eighths of an octave apart. Otherwise they stand for multiples of a
// step, dithered if there is a seed.
//
// Example: row exponent -40 and column exponent 0, in eighths of an octave, are the step 2^(-40 / 8) = 0.03125. With
// seed 7, the values 0.1, 0.1, 0.1, 0.1 of a row become:
//   position     0                1                2                3
//   dither       0.080078125      0.142578125      0.267578125     -0.349609375
//   value / step - dither
//                3.120            3.057            2.932            3.550
//   code         3                3                3                4          rounded to nearest, half to even
//   decoded      0.09625244       0.09820557       0.10211182       0.11407471  (code + dither) * step
// Equal values decode to values on both sides of 0.1: dithering makes the error independent of the value.
class Lattice {
   public:
    // Takes one exponent for each row, and one for each column or one for all. Throws std::invalid_argument.
    Lattice(bool powers, std::vector<int16_t> row_exponents, std::vector<int16_t> column_exponents, uint64_t rows,
            uint64_t columns, int32_t step, uint32_t seed);

    uint64_t count() const { return rows * columns; }

    // The same lattice with decoded values `gain` times as far from the values of `first` as before. `first` holds the
    // codes of the whole tensor and is borrowed. Throws std::invalid_argument.
    Lattice with_gain(Codes first, float gain) const;

    // True if every step is a normal float: exponents of rows and columns add up to at most 120 octaves.
    bool has_normal_steps() const;

    bool powers;
    uint64_t rows, columns;
    int32_t step;
    uint32_t seed;
    std::vector<int16_t> row_exponents, column_exponents;
    std::vector<float> row_steps, column_steps;
    std::vector<int16_t> row_classes, column_classes;  // exponents minus their mean, within half of 16 bits
    Codes origin;              // codes that a gain is relative to; none without a gain
    float excess_gain = 0.0f;  // gain - 1
};

// `count` runs of `length` positions each, with starts `stride` apart, such as some rows of a tensor.
struct Runs {
    uint64_t first, length, stride, count;
};

// Calls work(start, count, place) for every tile of every run: its positions in the tensor, and its place in the
// concatenated runs.
template <typename Work>
void by_tiles_of(const Runs& runs, size_t tile, Work work) {
    uint64_t place = 0;
    for (uint64_t run = 0; run < runs.count; ++run) {
        const uint64_t begin = runs.first + run * runs.stride, end = begin + runs.length;
        for (uint64_t start = begin; start < end; start += tile) {
            const auto count = static_cast<size_t>(std::min<uint64_t>(tile, end - start));
            work(start, count, place);
            place += count;
        }
    }
}

// For the positions [start, start + count), row by row: the steps, their size classes relative to the tensor's usual
// step, and their exponents.
void fill_steps(const Lattice& lattice, uint64_t start, size_t count, float* out);
void fill_step_classes(const Lattice& lattice, uint64_t start, size_t count, uint8_t* out);
void fill_exponents(const Lattice& lattice, uint64_t start, size_t count, int32_t* out);
void fill_exponents(const Lattice& lattice, uint64_t start, size_t count, int16_t* out);  // exponents must fit

// Fills in exponents within `allowed` of these: centers plus multiples of 2 * allowed + 1. Returns whether all are the
// centers, which are 0 if null.
bool round_exponents(const int16_t* exponents, const int16_t* centers, size_t count, int32_t allowed, int16_t* out);

// Fills dithers, which are added to codes: odd multiples of 1/512 in (-1/2, 1/2), by a hash of the position.
//
// Example: seed 7, position 1. 1 * 0x9E3779B1 + 7 = 0x9E3779B8 hashes to 0xA4F7896C. The top byte is 0xA4 = 164, so the
// dither is 164 / 256 + 1 / 512 - 1 / 2 = 0.142578125.
void fill_dithers(uint32_t seed, uint64_t start, size_t count, float* out);

}  // namespace shrinkpoint
