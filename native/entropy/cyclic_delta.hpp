// Codes as cyclic differences to the previous codes, as in arXiv 2306.11800: grouped by the previous code, run-length
// coded, Huffman coded. docs/format.md, "CyclicDelta deltas".
//
// With modulus 8, code 1 after code 6 is the difference (1 - 6) mod 8 = 3.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"

namespace shrinkpoint {

struct CyclicDelta {
    unsigned modulus;  // 1 to 256: the larger of the two numbers of codes
    bool rearranged;   // differences are grouped by the previous code
    bool runs;         // a repeated value is followed by its number of repeats
};

// `previous` is null if all previous codes are 0. Throws std::invalid_argument for a code that is not below the
// modulus.
Buffer cyclic_encode(const CyclicDelta& form, const uint8_t* codes, const uint8_t* previous, size_t count);

// Throws Corrupt or Truncated; reads and writes only inside the given spans. `out` must not overlap the others.
void cyclic_decode(const CyclicDelta& form, const uint8_t* data, size_t size, const uint8_t* previous, uint8_t* out,
                   size_t count);

}  // namespace shrinkpoint
