// Values -> the codes of the nearest points of a lattice.
#pragma once
#include <cstdint>

#include "floats.hpp"
#include "lattice_codes.hpp"
#include "lattice_grid.hpp"

namespace shrinkpoint {

// The points nearest to values, but the one of `previous`, which may be none, where the value is at most `hysteresis` steps
// from it. Returns whether points reach as far as the values do; where not, the codes are of no use. Throws
// std::invalid_argument where points stand for powers.
bool lattice_quantize(const Lattice& lattice, Floats values, const float* squares, Codes previous,
                      float hysteresis, int16_t* codes, unsigned threads);

}  // namespace shrinkpoint
