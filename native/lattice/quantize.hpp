// Values -> the codes of the nearest points of a lattice.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/floats.hpp"
#include "lattice/codes.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

// What errors of quantization, and their squares, are multiplied with; either may be none, which counts as 0.
struct ErrorWeights {
    Floats slopes, squares;
};

// Sums over the errors e = decoded - value, rounded to float32: of slopes times e, of squares times e * e, and of e * e.
struct ErrorSums {
    double slope = 0, curvature = 0, squares = 0;
};

// Codes of the points nearest to values, but that of `previous`, which may be none, where the value is at most
// `hysteresis` steps from it. Steps are relative to the roots of `seconds`, if these have a lattice. Returns the bytes
// that a code needs: 0 where points do not reach as far as the values do; where it is more than codes have, they are
// of no use, nor are the sums of errors, which are computed where there is a place for them. Throws
// std::invalid_argument for lattices of the wrong kind.
unsigned lattice_quantize(const Lattice& lattice, Floats values, const CodedMoments& seconds, Codes previous,
                          float hysteresis, uint8_t* codes, unsigned code_bytes, unsigned threads,
                          const ErrorWeights& weights = {}, ErrorSums* errors = nullptr);

constexpr size_t kMaxHysteresisLevels = 4096;

// How much of a weight's movement since the parent checkpoint is written. In the index-th place is the sum of
// movement times written movement of values with an offset from the parent's points, in steps, above the index-th of
// `levels` + 1 thresholds but not above the next one; thresholds lie evenly from 1/2 to the largest hysteresis, and the
// last place is for what is beyond. What is nearer is never written.
struct HysteresisSums {
    double movement = 0;  // squared, of all values
    std::vector<double> written;
};

// Of runs of positions, whose values, decoded parent and originals of the parent are given. One thread: these are
// samples. Throws std::invalid_argument.
HysteresisSums hysteresis_sums(const Lattice& lattice, Runs runs, Floats values, Floats decoded, Floats originals,
                               float max_hysteresis, size_t levels);

// The same sums for codes on a lattice of multiples.
ErrorSums quantization_error_sums(const Lattice& lattice, Codes codes, Floats values, const ErrorWeights& weights,
                                  unsigned threads);

}  // namespace shrinkpoint
