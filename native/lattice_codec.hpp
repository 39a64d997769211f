// Points of a lattice: values <-> codes <-> the bytes that are coded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "floats.hpp"
#include "lattice_codes.hpp"
#include "lattice_grid.hpp"

namespace shrinkpoint {

// Positions of a lattice's tensor, row by row.
struct Positions {
    uint64_t first, count;
};

// All arrays have lattice.count() elements, row by row; or, where positions are given, one for each of these. Steps are multiplied by the roots of
// `squares`, which may be null; these roots are rounded as IEEE 754 says, as those of no library need be.

// What a parent says of the points: those nearest to its values (without a parent: to 0), and under what to code the
// difference to them.
void lattice_predict(const Lattice& lattice, Floats parent, const float* squares, int16_t* guesses, uint8_t* contexts,
                   Positions positions, unsigned threads);

struct Differences {
    std::vector<int32_t> escapes;  // too large for a byte
    bool in_range = true;          // every code is one that a reader takes
    bool same = true;              // and stands for the value that was expected; a nan of 16 bits never does
};

// As lattice_predict, but what it leaves is the bytes to be coded; `expected` may be missing.
Differences lattice_encode(const Lattice& lattice, Floats parent, const float* squares, Codes codes,
                           Floats expected, uint8_t* contexts, uint8_t* tokens, unsigned threads);

// Codes, in the place of the guesses, and their values; returns how many of the escapes were used. Throws
// std::invalid_argument for tokens that need more than there are, and for a code that no writer has.
size_t lattice_decode(const Lattice& lattice, const uint8_t* tokens, const uint8_t* contexts, const int32_t* escapes,
                      size_t escape_count, const float* squares, int16_t* codes, float* values, Positions positions,
                      unsigned threads);

void lattice_values(const Lattice& lattice, Codes codes, const float* squares, float* values,
                    unsigned threads);

}  // namespace shrinkpoint
