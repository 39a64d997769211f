// Quantizes values to the nearest points of a lattice.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/floats.hpp"
#include "lattice/codes.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

// Weights of quantization errors and of their squares. Either may be none, which counts as 0.
struct ErrorWeights {
    Floats slopes, squares;
};

// Sums over the errors e = decoded - value, rounded to float32: slopes * e, squares * e * e, and e * e.
struct ErrorSums {
    double slope = 0, curvature = 0, squares = 0;
};

// Writes the codes of the nearest points. Where `previous` exists and the value is at most `hysteresis` steps from its
// point, keeps the previous code. Steps are relative to the roots of `seconds` if these have a lattice. Returns the
// bytes that a code needs: 0 if values are out of reach. If more than `code_bytes` are needed, neither the codes nor
// the sums of errors are valid. Sums are computed if `errors` is given. Throws std::invalid_argument for lattices of
// the wrong kind.
//
// Example of hysteresis, on the lattice of grid.hpp: the value 0.1 at position 3 lies at 3.550, 0.550 from previous
// code 3. With the default 0.5 it becomes 4; with 0.6 it keeps code 3, and its difference to the parent costs next to
// nothing.
unsigned lattice_quantize(const Lattice& lattice, Floats values, const CodedMoments& seconds, Codes previous,
                          float hysteresis, uint8_t* codes, unsigned code_bytes, unsigned threads,
                          const ErrorWeights& weights = {}, ErrorSums* errors = nullptr);

// Computes the sums of errors for codes on a lattice of multiples.
ErrorSums quantization_error_sums(const Lattice& lattice, Codes codes, Floats values, const ErrorWeights& weights,
                                  unsigned threads);

}  // namespace shrinkpoint
