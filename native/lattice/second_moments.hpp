// Sums of an optimizer's second moments by row and by column, and their codes on powers of two. Matrices are row-major.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/floats.hpp"

namespace shrinkpoint {

// Logarithms have base 2 and units of 2^-12; values below 2^-120 count as 2^-120. They are computed in integers, so
// their sums depend neither on the order nor on the machine. Sums of values are sums of doubles in an order that
// depends neither on threads nor on the instruction set. A value is present if it or its first moment is not zero.
struct SecondMomentSums {
    bool finite = true;           // true if all second and first moments are
    bool negative = false;        // true if some second moment is
    std::vector<double> row_logs, column_logs;      // sums of logarithms of present values; whole numbers
    std::vector<double> row_counts, column_counts;  // numbers of present values
    std::vector<double> row_sums, column_sums;      // sums of the values
};

// Sums by column are empty if they are not asked for.
SecondMomentSums second_moment_sums(Floats seconds, Floats firsts, uint64_t rows, uint64_t columns, bool by_column,
                                    unsigned threads);

// A grid of powers of two: exponents in eighths of an octave, one for each row, and one for each column or one for all.
struct PowerGrid {
    const int16_t* rows;
    const int16_t* columns;
    size_t column_count;
    int32_t step;
};

// Computes the codes of finite second moments >= 0. Moments nearer to the mean than `dead_zone` steps get code 0,
// moments that are not present the code of zero. Returns, by row, the sums of squared first moments divided by the
// decoded second moments where that is finite; empty without first moments. Throws std::invalid_argument.
std::vector<double> quantize_second_moments(Floats seconds, Floats firsts, uint64_t rows, uint64_t columns,
                                            const PowerGrid& grid, float dead_zone, int8_t* codes, unsigned threads);

}  // namespace shrinkpoint
