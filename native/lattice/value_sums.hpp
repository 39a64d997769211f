// The largest magnitude, the mean and the variance of an array of floats, read once.
#pragma once
#include <cstdint>

#include "base/floats.hpp"

namespace shrinkpoint {

struct ValueSums {
    float max_magnitude = 0;  // infinite or nan if a value is
    double mean = 0;
    double squared_deviations = 0;  // sum of squared distances from the mean; 0 if all values are equal
};

// Sums are sums of doubles in an order that depends neither on threads nor on the instruction set.
ValueSums value_sums(Floats values, uint64_t count, unsigned threads);

}  // namespace shrinkpoint
