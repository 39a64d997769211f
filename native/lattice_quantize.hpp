// Values -> the codes of the nearest points of a lattice.
#pragma once
#include <cstdint>

#include "floats.hpp"
#include "lattice_codes.hpp"
#include "lattice_grid.hpp"

namespace shrinkpoint {

// Codes of the points nearest to values, but that of `previous`, which may be none, where the value is at most
// `hysteresis` steps from it. Steps are relative to the roots of `seconds`, if these have a lattice. Returns the bytes
// that a code needs: 0 where points do not reach as far as the values do; where it is more than codes have, they are
// of no use. Throws std::invalid_argument for lattices of the wrong kind.
unsigned lattice_quantize(const Lattice& lattice, Floats values, const CodedMoments& seconds, Codes previous,
                          float hysteresis, uint8_t* codes, unsigned code_bytes, unsigned threads);

// Sums over the errors e = decoded - value, rounded to float32: of slopes times e, of squares times e * e, and of e * e.
// Slopes and squares may be none, which count as 0.
struct ErrorSums {
    double slope = 0, curvature = 0, squares = 0;
};

ErrorSums quantization_error_sums(const Lattice& lattice, Codes codes, Floats values, Floats slopes, Floats squares,
                                  unsigned threads);

}  // namespace shrinkpoint
