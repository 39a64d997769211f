// Values -> codes on a lattice, each column rounded with the errors of the columns before it fed back.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/floats.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

// Rounds the columns of a matrix one after another (LDLQ, arXiv 2307.13304, section 3). `factor` is the upper Cholesky
// factor of second moments whose columns are in reverse order, `lattice.columns` floats a row; what is below its diagonal
// is not read. Column k, n - 1 - k = i in that order, becomes the point nearest to its value + the sum over j > i of
// factor[i, j] / factor[i, i] * (value - point) of column n - 1 - j. Returns whether codes, of two bytes, reach as far as
// all values; otherwise they are of no use. The result depends neither on the number of threads nor on the instruction
// set. Throws std::invalid_argument for points that stand for powers.
bool quantize_with_feedback(const Lattice& lattice, Floats values, const float* factor, int16_t* codes,
                            unsigned threads);

}  // namespace shrinkpoint
