// Predicts the codes of a lattice, and the context to code them under, for runs of positions: docs/format.md.
#pragma once
#include <cstddef>
#include <cstdint>

#include "lattice/grid.hpp"

namespace shrinkpoint {

// Guesses the point nearest to the parent's value. The context is the remaining distance and the size of the step.
//
// Example: step 2^-5, dither 0.080078125, parent's value 0.12. The position is 0.12 * 32 - 0.080078125 = 3.76, the
// guess 4. The remainder -0.24 is in cell floor((-0.24 + 0.5) * 16) = 4 of 16, the step in class 4 of 8: context 4 * 8
// + 4 = 36.
void guess_multiples(const float* parent, const float* steps, const float* dithers, const uint8_t* classes,
                     size_t count, int16_t* guesses, uint8_t* contexts);

// Same without a parent: the point nearest to 0 has code 0, and its distance is the dither.
void guess_zeros(const float* dithers, const uint8_t* classes, size_t count, int16_t* guesses, uint8_t* contexts);

// Same for a parent on this very lattice: its codes are the guesses, and their distances are rounding. The contexts are
// those from kSameContexts on, one a class.
constexpr int32_t kSameContexts = 16 * kStepClasses;
void guess_same(const int16_t* parent, const uint8_t* classes, size_t count, int16_t* guesses, uint8_t* contexts);

// Most values are where their row and column say, whatever the parent's values were. So that is the guess, and the
// parent's point is the context: the quarters of a step by which it lies above. The parent's values are read as
// integers: an octave has eight parts of equal width, nearly those of powers of two.
void guess_powers(const float* parent, const int32_t* exponents, int32_t step, size_t count, int16_t* guesses,
                  uint8_t* contexts);

// Same for a parent whose values are powers of two: of 2^(k / 8) within an octave, k - 1 eighths are below it.
void guess_powers_of_codes(const int16_t* codes, const int32_t* code_exponents, int32_t code_step,
                           const int32_t* exponents, int32_t step, size_t count, int16_t* guesses, uint8_t* contexts);

// Same for codes of one byte, in 16-bit arithmetic. Needs steps within kMinShortStep and kMaxShortStep, a parent's step
// of at most kMaxShortParentStep, and exponents of at most kMaxShortExponent.
constexpr int32_t kMinShortStep = 2, kMaxShortStep = 45, kMaxShortParentStep = 200, kMaxShortExponent = 1 << 12;
void guess_powers_of_bytes(const int8_t* codes, const int16_t* code_exponents, int16_t code_step,
                           const int16_t* exponents, int16_t step, size_t count, int16_t* guesses, uint8_t* contexts);

}  // namespace shrinkpoint
