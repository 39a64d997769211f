// Sums of an optimizer's second moments by row and by column, and their codes on powers of two. Matrices are row-major.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/floats.hpp"
#include "lattice/grid.hpp"

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

// Whole numbers by row or by column: the sums of logarithms, and how many values are present.
struct LogSums {
    const double* logs;
    const double* counts;
    size_t size;
};

// Fills in exponents, in eighths of an octave: the means of the logarithms of rows, and those of columns beside the mean
// of all, which stands for what has no value. A single exponent of rows is of all values, one of columns is 0.
void second_exponents(const LogSums& row_sums, const LogSums& column_sums, int32_t limit, int16_t* rows,
                      size_t row_count, int16_t* columns, size_t column_count);

// The codes of an earlier checkpoint, on a lattice of powers of its own; null if there is none.
struct EarlierPowers {
    const Lattice* lattice = nullptr;
    const int8_t* codes = nullptr;
};

// How far a moment may be from the point that it becomes, in steps.
struct PowerZones {
    float dead;          // from code 0
    float above, below;  // from the point nearest to the earlier value, for values above it and below
};

// Computes the codes of finite second moments >= 0 on a lattice of powers of two. Moments within the zone of the
// earlier value get its nearest code, of the others those within the dead zone code 0. Moments that are not present
// get the code of zero. Returns, by row, the sums of squared first moments divided by the decoded second moments where
// that is finite; empty without first moments. A lattice of one column has it as its row, so `rows` says how many the
// matrix has. Throws std::invalid_argument.
std::vector<double> quantize_second_moments(const Lattice& lattice, uint64_t rows, Floats seconds, Floats firsts,
                                            const EarlierPowers& earlier, const PowerZones& zones, int8_t* codes,
                                            unsigned threads);

}  // namespace shrinkpoint
