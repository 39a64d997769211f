// Measures on some rows of a weight how far it has moved since earlier checkpoints, and how far its points have.
#pragma once
#include <array>
#include <cstddef>
#include <vector>

#include "base/floats.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

constexpr size_t kMaxHysteresisLevels = 4096;

// Sums over the movement of values since some time: the movement squared, times the movement of the parent's points
// since the first ones, and, by threshold, times what is written of it. A value is written if its offset from the
// parent's point, in steps, is above the threshold. Thresholds are evenly spaced from 1/2 to the largest hysteresis.
struct MovementSums {
    double squared = 0, before = 0;
    std::vector<double> written;
};

// Computes the sums since two earlier times for runs of positions, from their values now and then, and the codes of the
// whole tensor in the parent checkpoint and at first. Uses one thread, since these are samples. Throws
// std::invalid_argument.
std::array<MovementSums, 2> movement_sums(const Lattice& lattice, Runs runs, Codes parent, Codes first, Floats values,
                                          const std::array<Floats, 2>& earlier, float max_hysteresis, size_t levels);

// True if the values of runs of positions are all at most `max_steps` steps from the points of these codes.
bool near_points(const Lattice& lattice, Runs runs, Codes codes, Floats values, float max_steps);

}  // namespace shrinkpoint
