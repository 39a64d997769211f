// Measures how much of a weight's movement a checkpoint holds: sums over four arrays, read once.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/floats.hpp"

namespace shrinkpoint {

// For weights w and their stored values s, now and at the parent checkpoint, with the movement d = w_now - w_parent and
// the stored movement e = s_now - s_parent, each rounded to float32.
struct ProgressSums {
    double movement = 0;         // sum of d * d
    double stored_movement = 0;  // sum of d * e
    double weight = 0;           // sum of w_now * w_now
    double stored_weight = 0;    // sum of w_now * s_now
};

// Products are exact. Sums are sums of doubles in an order that depends neither on threads nor on the instruction set.
ProgressSums progress_sums(Floats weight, Floats parent_weight, Floats stored, Floats parent_stored,
                           uint64_t count, unsigned threads);

}  // namespace shrinkpoint
