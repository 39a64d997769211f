// Sums side by side, with the same number of lanes in every instruction set, so that all add in the same order.
#pragma once
#include <cstddef>

#include "base/simd.hpp"

namespace shrinkpoint {

// Calls add(i, lane) for every i below `count`; lanes take turns. With 3 lanes, lane 0 adds x[0], x[3], x[6], ...
template <size_t kCount, typename Add>
SHRINKPOINT_INLINE void by_lanes(size_t count, Add add) {
    size_t i = 0;
    for (; i + kCount <= count; i += kCount)
        for (size_t lane = 0; lane < kCount; ++lane) add(i + lane, lane);
    for (size_t lane = 0; i < count; ++i, ++lane) add(i, lane);
}

template <size_t kCount>
SHRINKPOINT_INLINE double sum_lanes(const double (&lanes)[kCount]) {
    double sum = 0;
    for (size_t lane = 0; lane < kCount; ++lane) sum += lanes[lane];
    return sum;
}

}  // namespace shrinkpoint
