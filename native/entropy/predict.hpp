// Predicts values and levels for a short run of positions at a time.
#pragma once
#include "entropy/model.hpp"

namespace shrinkpoint {

// Sets rounding to nearest and no flushing of denormals while it lives. Both belong to the thread, and predictions must
// not depend on the caller's.
class ScopedFpEnvironment {
   public:
    ScopedFpEnvironment();
    ~ScopedFpEnvironment();
    ScopedFpEnvironment(const ScopedFpEnvironment&) = delete;
    ScopedFpEnvironment& operator=(const ScopedFpEnvironment&) = delete;

   private:
    [[maybe_unused]] uint64_t saved_ = 0;
};

// Predicts W_t from W_(t-1) by one step of Adam, every operation rounded to float32 in torch's order. Where the result
// is not finite the prediction is the base.
void predict_adam(const Model& model, const float* base, const float* moment1, const float* moment2, size_t count,
                  uint32_t* predicted);

// Predicts v_t from v_(t-1), the gradient being (m_t - beta1 m_(t-1)) / (1 - beta1). `squares` gets the bits of the
// part that the gradient adds.
void predict_square(const Model& model, const float* base, const float* moment1, const float* moment1_base,
                    size_t count, uint32_t* predicted, uint32_t* squares);

constexpr int32_t kZeroLevel = INT32_MIN;

// Predicts levels from the factors for positions [start, start + count); kZeroLevel where a factor is kZeroRow.
void predict_levels(const Factors& factors, uint64_t start, size_t count, int32_t* levels);

// Fits factors to magnitudes: the mean level of each row and column over the values that are not zero. `values` are
// floats of `width` bits with `mantissa` bits of mantissa. Segments must be filled in; the rest is set.
void fit_factors(const uint8_t* values, unsigned width, unsigned mantissa, unsigned fine, Factors& factors);

}  // namespace shrinkpoint
