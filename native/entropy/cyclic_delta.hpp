// Codes as cyclic differences to the codes before them, the way of arXiv 2306.11800: grouped by the code
// before, run-length coded, Huffman coded. docs/format.md, "CyclicDelta deltas".
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"

namespace shrinkpoint {

struct CyclicDelta {
    unsigned modulus;  // of the differences, 1 to 256: the larger of the two numbers of codes
    bool rearranged;   // they are grouped by the code before
    bool runs;         // a value that repeats is followed by how often
};

// `previous` is null where all codes before are 0. Throws std::invalid_argument for a code that is not below the
// modulus.
Buffer cyclic_encode(const CyclicDelta& form, const uint8_t* codes, const uint8_t* previous, size_t count);

// Throws Corrupt or Truncated; reads and writes only inside the given spans. `out` must not overlap the others.
void cyclic_decode(const CyclicDelta& form, const uint8_t* data, size_t size, const uint8_t* previous, uint8_t* out,
                   size_t count);

}  // namespace shrinkpoint
