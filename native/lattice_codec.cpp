#include "lattice_codec.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "lattice_cells.hpp"
#include "simd.hpp"
#include "tiles.hpp"

namespace shrinkpoint {

namespace {

constexpr int32_t kEscape = -128;
constexpr int32_t kOffsets = 16, kQuarters = 12;
constexpr float kNear = 1.0f / 64;

SHRINKPOINT_KERNEL(bool, same_when_narrow, (const float* values, const uint16_t* expected, size_t count),
                   (values, expected, count)) {
    uint32_t differing_bits = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_of(values[i]);
        const uint32_t narrow = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        differing_bits |= (narrow ^ expected[i]) | ((bits & 0x7fffffff) > 0x7f800000);
    }
    return differing_bits == 0;
}

// The nearest point, and by how much it is missed and how large the step is.
SHRINKPOINT_KERNEL(void, guess_multiples,
                   (const float* parent, const float* steps, const float* dithers, const uint8_t* classes, size_t count,
                    int16_t* guesses, uint8_t* contexts),
                   (parent, steps, dithers, classes, count, guesses, contexts)) {
    for (size_t i = 0; i < count; ++i) {
        const float position = reachable(parent[i] / steps[i] - dithers[i]);
        const int32_t code = rounded(position);
        const float remainder = position - static_cast<float>(code);
        int32_t offset = std::min(static_cast<int32_t>((remainder + 0.5f) * kOffsets), kOffsets - 1);
        offset = chosen(std::fabs(remainder) < kNear, kOffsets, offset);
        guesses[i] = static_cast<int16_t>(code);
        contexts[i] = static_cast<uint8_t>(offset * kStepClasses + classes[i]);
    }
}

// Most values are where their row and column say, whatever the parent's were: so that is the guess, and the parent's
// point is context, by how many quarters of a step it is above them. The parent's values are taken as integers: an
// octave has eight parts of equal width, nearly those of powers of two.
SHRINKPOINT_KERNEL(void, guess_powers,
                   (const float* parent, const int32_t* exponents, int32_t step, size_t count, int16_t* guesses,
                    uint8_t* contexts),
                   (parent, exponents, step, count, guesses, contexts)) {
    const auto width = static_cast<float>(step);
    for (size_t i = 0; i < count; ++i) {
        const auto bits = static_cast<int32_t>(bits_of(parent[i]));
        const int32_t distance = (bits >> 20) - 127 * kStepsPerOctave - exponents[i];
        // Exact: both are below 2^24, and a quotient that is not whole is further from whole ones than it is rounded.
        float quotient = static_cast<float>(4 * distance) / width;
        quotient = std::min(std::max(quotient, -kQuarters - 1.0f), kQuarters + 1.0f);
        int32_t quarters = static_cast<int32_t>(quotient);
        quarters -= static_cast<float>(quarters) > quotient;
        quarters = std::min(std::max(quarters, -kQuarters), kQuarters - 1) + kQuarters;
        guesses[i] = static_cast<int16_t>(chosen(bits == 0, kZeroCode, 0));
        contexts[i] = static_cast<uint8_t>(chosen(bits == 0, 2 * kQuarters, quarters));
    }
}

// Returns how many differences are escapes, and 2^31 where a code is out of range.
SHRINKPOINT_KERNEL(uint32_t, subtract,
                   (const int16_t* codes, const int16_t* guesses, const uint8_t* contexts, size_t count,
                    uint8_t* tokens),
                   (codes, guesses, contexts, count, tokens)) {
    uint32_t escapes = 0, out_of_range = 0;
    for (size_t i = 0; i < count; ++i) {
        const int32_t code = codes[i], difference = code - guesses[i];
        const bool large = difference > -kEscape - 1 || difference < kEscape + 1;
        escapes += large;
        out_of_range |= code > kMaxCode || code < -kMaxCode;
        tokens[i] = static_cast<uint8_t>(contexts[i] + (large ? kEscape : difference));
    }
    return escapes | out_of_range << 31;
}

// Returns the same; what escapes are is not added yet.
SHRINKPOINT_KERNEL(uint32_t, add, (const uint8_t* tokens, const uint8_t* contexts, size_t count, int16_t* codes),
                   (tokens, contexts, count, codes)) {
    uint32_t escapes = 0, out_of_range = 0;
    for (size_t i = 0; i < count; ++i) {
        const int32_t difference = static_cast<int8_t>(tokens[i] - contexts[i]);
        const bool large = difference == kEscape;
        const int32_t code = codes[i] + (large ? 0 : difference);
        escapes += large;
        out_of_range |= code > kMaxCode || code < -kMaxCode;
        codes[i] = static_cast<int16_t>(code);
    }
    return escapes | out_of_range << 31;
}

SHRINKPOINT_KERNEL(size_t, count_escapes, (const uint8_t* tokens, const uint8_t* contexts, size_t count),
                   (tokens, contexts, count)) {
    uint32_t escapes = 0;
    for (size_t i = 0; i < count; ++i)
        escapes += static_cast<uint8_t>(tokens[i] - contexts[i]) == static_cast<uint8_t>(kEscape);
    return escapes;
}

// `parent` is theirs, too.
void guess(const Lattice& lattice, Floats parent, uint64_t start, size_t count, Cells& cells, int16_t* guesses,
           uint8_t* contexts) {
    if (lattice.powers && parent.data == nullptr) {
        std::fill_n(guesses, count, int16_t{0});
        std::fill_n(contexts, count, uint8_t{0});
        return;
    }
    if (lattice.powers) {
        const float* values = read_floats(parent, 0, count, cells.parent);
        return guess_powers(values, cells.exponents, lattice.step, count, guesses, contexts);
    }
    fill_step_classes(lattice, start, count, cells.classes);
    if (parent.data != nullptr) {
        const float* values = read_floats(parent, 0, count, cells.parent);
        return guess_multiples(values, cells.steps, cells.dithers, cells.classes, count, guesses, contexts);
    }
    std::fill_n(cells.parent, count, 0.0f);
    std::fill_n(cells.values, count, 1.0f);  // whatever a step is, it does not move 0
    guess_multiples(cells.parent, cells.values, cells.dithers, cells.classes, count, guesses, contexts);
}

bool is_same(const float* values, Floats expected, uint64_t start, size_t count) {
    const uint8_t* expected_values = expected.data + start * expected.bytes;
    if (expected.bytes == 4) return std::memcmp(values, expected_values, 4 * count) == 0;
    return same_when_narrow(values, reinterpret_cast<const uint16_t*>(expected_values), count);
}

// Where the escapes of every piece start, and how many there are.
std::vector<size_t> escapes_before(const uint8_t* tokens, const uint8_t* contexts, uint64_t count, unsigned threads) {
    std::vector<size_t> out(chunk_count(count, kPiece) + 1);
    by_tiles(count, threads, [&](size_t piece, uint64_t start, size_t length, Cells&) {
        out[piece + 1] += count_escapes(tokens + start, contexts + start, length);
    });
    for (size_t i = 1; i < out.size(); ++i) out[i] += out[i - 1];
    return out;
}

// Adds what escapes are; returns whether all codes are in range.
bool add_escapes(const uint8_t* tokens, const uint8_t* contexts, size_t count, const int32_t* escapes, int16_t* codes) {
    bool in_range = true;
    for (size_t i = 0; i < count; ++i) {
        if (static_cast<int8_t>(tokens[i] - contexts[i]) != kEscape) continue;
        const int64_t code = int64_t{codes[i]} + *escapes++;
        in_range &= -kMaxCode <= code && code <= kMaxCode;
        codes[i] = static_cast<int16_t>(code);
    }
    return in_range;
}

}  // namespace

void lattice_predict(const Lattice& lattice, Floats parent, const float* squares, int16_t* guesses, uint8_t* contexts,
                     Positions positions, unsigned threads) {
    by_tiles(positions.count, threads, [&](size_t, uint64_t start, size_t count, Cells& cells) {
        const uint64_t place = positions.first + start;
        fill_cells(lattice, offset_by(squares, start), place, count, cells);
        guess(lattice, offset_by(parent, start), place, count, cells, guesses + start, contexts + start);
    });
}

Differences lattice_encode(const Lattice& lattice, Floats parent, const float* squares, Codes codes,
                           Floats expected, uint8_t* contexts, uint8_t* tokens, unsigned threads) {
    std::vector<std::vector<int32_t>> escapes(chunk_count(lattice.count(), kPiece));
    std::atomic<bool> in_range{true}, same{true};
    by_tiles(lattice.count(), threads, [&](size_t piece, uint64_t start, size_t count, Cells& cells) {
        fill_cells(lattice, offset_by(squares, start), start, count, cells);
        guess(lattice, offset_by(parent, start), start, count, cells, cells.guesses, contexts + start);
        const int16_t* tile_codes = read_codes(codes, start, count, cells.codes);
        const uint32_t report = subtract(tile_codes, cells.guesses, contexts + start, count, tokens + start);
        if (report >> 31 != 0) in_range = false;
        for (size_t i = 0; (report & 0x7fffffff) != 0 && i < count; ++i) {
            const int32_t difference = tile_codes[i] - cells.guesses[i];
            if (std::abs(difference) >= -kEscape) escapes[piece].push_back(difference);
        }
        if (expected.data == nullptr) return;
        values_of_codes(lattice, tile_codes, count, cells, cells.values);
        if (!is_same(cells.values, expected, start, count)) same = false;
    });
    Differences out;
    for (const auto& some : escapes) out.escapes.insert(out.escapes.end(), some.begin(), some.end());
    out.in_range = in_range, out.same = same;
    return out;
}

size_t lattice_decode(const Lattice& lattice, const uint8_t* tokens, const uint8_t* contexts, const int32_t* escapes,
                      size_t escape_count, const float* squares, int16_t* codes, float* values, Positions positions,
                      unsigned threads) {
    std::vector<size_t> first_escape(chunk_count(positions.count, kPiece) + 1);
    if (escape_count != 0) first_escape = escapes_before(tokens, contexts, positions.count, threads);
    const size_t used = first_escape.back();
    by_tiles(positions.count, threads, [&](size_t piece, uint64_t start, size_t count, Cells& cells) {
        const uint32_t report = add(tokens + start, contexts + start, count, codes + start);
        const size_t large = report & 0x7fffffff;
        bool in_range = report >> 31 == 0;
        if (large > escape_count - std::min(escape_count, first_escape[piece]))
            throw std::invalid_argument("more large differences than escapes");
        if (large != 0)
            in_range &=
                add_escapes(tokens + start, contexts + start, count, escapes + first_escape[piece], codes + start);
        first_escape[piece] += large;
        if (!in_range) throw std::invalid_argument("a point that is too far out");
        fill_cells(lattice, offset_by(squares, start), positions.first + start, count, cells);
        values_of_codes(lattice, codes + start, count, cells, values + start);
    });
    return used;
}

void lattice_values(const Lattice& lattice, Codes codes, const float* squares, float* values,
                    unsigned threads) {
    by_tiles(lattice.count(), threads, [&](size_t, uint64_t start, size_t count, Cells& cells) {
        fill_cells(lattice, offset_by(squares, start), start, count, cells);
        values_of_codes(lattice, read_codes(codes, start, count, cells.codes), count, cells, values + start);
    });
}

}  // namespace shrinkpoint
