// Quantizes the columns of a matrix in turn and feeds each column's error back to the next ones.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/floats.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

// Rounds the columns of a matrix one after another (LDLQ, arXiv 2307.13304, section 3). `factor` is the upper Cholesky
// factor of second moments with columns in reverse order, `lattice.columns` floats a row; entries below its diagonal
// are not read. Column k is i = n - 1 - k in that order. It becomes the point nearest to its value + the sum over j > i
// of factor[i, j] / factor[i, i] * (value - point) of column n - 1 - j. Returns true if two-byte codes reach all
// values; otherwise the codes are not valid. The result depends neither on the number of threads nor on the instruction
// set. Throws std::invalid_argument for points that stand for powers.
bool quantize_with_feedback(const Lattice& lattice, Floats values, const float* factor, int16_t* codes,
                            unsigned threads);

}  // namespace shrinkpoint
