// Values as multiples of a step for each of them, which both ends compute: comm/compressors/step_codes.py.
//
// Example: values 0.5, -0.2 and 100 with roots 0.1, 0.4 and 0.1 and the factor 2 have the steps 0.2, 0.8 and 0.2. Their
// multiples 2.5, -0.25 and 500 are rounded, half to even, to 2, 0 and the escape 127. The codes are the bytes 130, 128
// and 255. The first two decode to 0.4 and 0.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

constexpr int32_t kStepEscape = 127;  // magnitude of the code of a value that is further away, or nan
constexpr int32_t kStepOffset = 128;  // added to a code to make a byte of it
constexpr int32_t kMaxStepLevel = 8;  // magnitude that larger codes count as in the sum

struct StepSums {
    uint64_t magnitudes = 0;  // of the codes, each up to kMaxStepLevel
    uint64_t escapes = 0;     // codes whose magnitude is kStepEscape
};

// Turns second moments into their roots, in place; into `least` where the root is below it or not finite.
void step_roots(float* moments, size_t count, float least);

// Rounds values / (roots / inverse) to the nearest codes.
StepSums step_round(const float* values, const float* roots, float inverse, size_t count, uint8_t* codes);

// Writes what codes stand for: code * factor * root.
void step_multiply(const uint8_t* codes, const float* roots, float factor, size_t count, float* values);

}  // namespace shrinkpoint
