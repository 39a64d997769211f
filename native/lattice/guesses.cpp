#include "lattice/guesses.hpp"

#include <algorithm>
#include <cmath>

#include "base/bits.hpp"
#include "base/simd.hpp"
#include "lattice/cells.hpp"

namespace shrinkpoint {

namespace {

constexpr int32_t kOffsets = 16, kQuarters = 12;
constexpr float kNear = 1.0f / 64;

// Quarters of a step in `distance` eighths of an octave, rounded down. `inverse` is 1 / (eighths in a step).
SHRINKPOINT_INLINE int32_t quarters_of(int32_t distance, float inverse) {
    // The 0.5 keeps the quotient away from whole numbers, so that the product is on the same side of them.
    float quotient = (static_cast<float>(4 * distance) + 0.5f) * inverse;
    quotient = std::min(std::max(quotient, -kQuarters - 1.0f), kQuarters + 1.0f);
    int32_t quarters = static_cast<int32_t>(quotient);
    quarters -= static_cast<float>(quarters) > quotient;
    return std::min(std::max(quarters, -kQuarters), kQuarters - 1) + kQuarters;
}

// Stores guess and context of a power: those of zero, or of the point that lies `quarters` from its parent's.
SHRINKPOINT_INLINE void put_power(bool zero, int32_t quarters, int16_t& guess, uint8_t& context) {
    guess = static_cast<int16_t>(chosen(zero, kZeroCode, 0));
    context = static_cast<uint8_t>(chosen(zero, 2 * kQuarters, quarters));
}

}  // namespace

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

SHRINKPOINT_KERNEL(void, guess_zeros,
                   (const float* dithers, const uint8_t* classes, size_t count, int16_t* guesses, uint8_t* contexts),
                   (dithers, classes, count, guesses, contexts)) {
    for (size_t i = 0; i < count; ++i) {
        const auto offset = static_cast<int32_t>((0.5f - dithers[i]) * kOffsets);
        guesses[i] = 0;
        contexts[i] =
            static_cast<uint8_t>(chosen(std::fabs(dithers[i]) < kNear, kOffsets, offset) * kStepClasses + classes[i]);
    }
}

SHRINKPOINT_KERNEL(void, guess_same,
                   (const int16_t* parent, const uint8_t* classes, size_t count, int16_t* guesses, uint8_t* contexts),
                   (parent, classes, count, guesses, contexts)) {
    for (size_t i = 0; i < count; ++i) {
        const int32_t code = parent[i];
        guesses[i] = static_cast<int16_t>(std::min(std::max(code, -kMaxCode), kMaxCode));
        contexts[i] = static_cast<uint8_t>(kSameContexts + classes[i]);
    }
}

SHRINKPOINT_KERNEL(void, guess_powers,
                   (const float* parent, const int32_t* exponents, int32_t step, size_t count, int16_t* guesses,
                    uint8_t* contexts),
                   (parent, exponents, step, count, guesses, contexts)) {
    const float inverse = 1 / static_cast<float>(step);
    for (size_t i = 0; i < count; ++i) {
        const auto bits = static_cast<int32_t>(bits_of(parent[i]));
        const int32_t quarters = quarters_of((bits >> 20) - 127 * kStepsPerOctave - exponents[i], inverse);
        put_power(bits == 0, quarters, guesses[i], contexts[i]);
    }
}

SHRINKPOINT_KERNEL(void, guess_powers_of_codes,
                   (const int16_t* codes, const int32_t* code_exponents, int32_t code_step, const int32_t* exponents,
                    int32_t step, size_t count, int16_t* guesses, uint8_t* contexts),
                   (codes, code_exponents, code_step, exponents, step, count, guesses, contexts)) {
    const float inverse = 1 / static_cast<float>(step);
    for (size_t i = 0; i < count; ++i) {
        const int32_t exponent = code_exponents[i] + code_step * codes[i];
        const int32_t eighths = exponent & (kStepsPerOctave - 1);
        const int32_t of_octave = eighths - (eighths > 0);
        const int32_t quarters =
            quarters_of(octave_of(exponent) * kStepsPerOctave + of_octave - exponents[i], inverse);
        put_power(codes[i] == kZeroCode, quarters, guesses[i], contexts[i]);
    }
}

SHRINKPOINT_KERNEL(void, guess_powers_of_bytes,
                   (const int8_t* codes, const int16_t* code_exponents, int16_t code_step, const int16_t* exponents,
                    int16_t step, size_t count, int16_t* guesses, uint8_t* contexts),
                   (codes, code_exponents, code_step, exponents, step, count, guesses, contexts)) {
    // The quotient is exact for 0 to 32 steps: the reciprocal is too large, which adds less than 1 / step to it.
    const auto reciprocal = static_cast<uint16_t>(0x10000 / step + 1);
    const auto most = static_cast<int16_t>(4 * step);
    for (size_t i = 0; i < count; ++i) {
        const int16_t code = codes[i];
        const auto exponent = static_cast<int16_t>(code_exponents[i] + static_cast<int16_t>(code_step * code));
        const auto eighths = static_cast<int16_t>(exponent & (kStepsPerOctave - 1));
        const auto octave = static_cast<int16_t>(octave_of(exponent));
        const auto of_octave = static_cast<int16_t>(eighths - (eighths > 0) - exponents[i]);
        const auto distance = static_cast<int16_t>(octave * kStepsPerOctave + of_octave);
        const int16_t within = std::min(std::max(distance, static_cast<int16_t>(-most)), most);
        const auto product = uint32_t{static_cast<uint16_t>(4 * (within + most))} * reciprocal;
        const auto quarters = static_cast<int16_t>(static_cast<int16_t>(product >> 16) - (16 - kQuarters));
        const bool zero = code == kZeroCode;
        guesses[i] = zero ? kZeroCode : int16_t{0};
        contexts[i] = static_cast<uint8_t>(
            zero ? 2 * kQuarters : std::min(std::max(quarters, int16_t{0}), static_cast<int16_t>(2 * kQuarters - 1)));
    }
}

}  // namespace shrinkpoint
