// What codes of a lattice are predicted to be, and under which context: for runs of positions, as docs/format.md says.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// The nearest point, and by how much it is missed and how large the step is.
void guess_multiples(const float* parent, const float* steps, const float* dithers, const uint8_t* classes,
                     size_t count, int16_t* guesses, uint8_t* contexts);

// The same without a parent: the nearest point to 0 is that of code 0, and missed by the dither alone.
void guess_zeros(const float* dithers, const uint8_t* classes, size_t count, int16_t* guesses, uint8_t* contexts);

// The same where the parent is on this very lattice: its codes are the guesses, and what they are missed by is rounding.
void guess_same(const int16_t* parent, const uint8_t* classes, size_t count, int16_t* guesses, uint8_t* contexts);

// Most values are where their row and column say, whatever the parent's were: so that is the guess, and the parent's
// point is context, by how many quarters of a step it is above them. The parent's values are taken as integers: an
// octave has eight parts of equal width, nearly those of powers of two.
void guess_powers(const float* parent, const int32_t* exponents, int32_t step, size_t count, int16_t* guesses,
                  uint8_t* contexts);

// The same where the parent's values are powers of two: of 2^(k / 8) within an octave, k - 1 eighths are below it.
void guess_powers_of_codes(const int16_t* codes, const int32_t* code_exponents, int32_t code_step,
                           const int32_t* exponents, int32_t step, size_t count, int16_t* guesses, uint8_t* contexts);

// The same of codes of one byte, in arithmetic of 16 bits: for steps within kMinShortStep and kMaxShortStep, a parent's
// of at most kMaxShortParentStep, and exponents of at most kMaxShortExponent.
constexpr int32_t kMinShortStep = 2, kMaxShortStep = 45, kMaxShortParentStep = 200, kMaxShortExponent = 1 << 12;
void guess_powers_of_bytes(const int8_t* codes, const int16_t* code_exponents, int16_t code_step,
                           const int16_t* exponents, int16_t step, size_t count, int16_t* guesses, uint8_t* contexts);

}  // namespace shrinkpoint
