// Second moments of an optimizer: sums by row and by column, and codes of powers of two. Matrices lie row by row.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/floats.hpp"

namespace shrinkpoint {

// Logarithms are in units of 2^-12, of base 2, and those of less than 2^-120 count as that. They are computed with
// integers, so their sums depend neither on the order nor on the machine; sums of values are those of doubles in an
// order that depends neither on threads nor on the instruction set. A value is present if it is not zero, or if its
// first moment is not.
struct SecondMomentSums {
    bool finite = true;           // all second and first moments
    bool negative = false;        // some second moment
    std::vector<double> row_logs, column_logs;      // of what is present; whole numbers
    std::vector<double> row_counts, column_counts;  // of what is present
    std::vector<double> row_sums, column_sums;      // of the values
};

// Those by column are left empty if they are not wanted.
SecondMomentSums second_moment_sums(Floats seconds, Floats firsts, uint64_t rows, uint64_t columns, bool by_column,
                                    unsigned threads);

// A grid of powers of two: exponents in eighths of an octave, one for each row, and one for each column or for all.
struct PowerGrid {
    const int16_t* rows;
    const int16_t* columns;
    size_t column_count;
    int32_t step;
};

// The codes of finite second moments from zero on; those nearer to the mean than `dead_zone` steps get 0, those that
// are not present the code of zero. Returns by row the sums of the squares of the first moments, divided by the second
// ones as a reader decodes them, where that is finite; nothing without first moments. Throws std::invalid_argument.
std::vector<double> quantize_second_moments(Floats seconds, Floats firsts, uint64_t rows, uint64_t columns,
                                            const PowerGrid& grid, float dead_zone, int8_t* codes, unsigned threads);

}  // namespace shrinkpoint
