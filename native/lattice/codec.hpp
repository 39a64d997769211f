// Codes of a lattice <-> the bytes that are coded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/checksum.hpp"
#include "base/floats.hpp"
#include "entropy/record_codec.hpp"
#include "lattice/codes.hpp"
#include "lattice/grid.hpp"

namespace shrinkpoint {

// Positions of a lattice's tensor, row by row.
struct Positions {
    uint64_t first, count;
};

// Float32 values: an array, or codes that are decoded tile by tile; neither for none. `lattice` is that of the whole
// tensor; arrays hold one element for each position at hand.
struct Values {
    Floats floats;
    const Lattice* lattice = nullptr;
    Codes codes;

    bool none() const { return floats.data == nullptr && lattice == nullptr; }
};

// What the points of a tensor are predicted from and decoded with. Steps are multiplied by the roots of `squares`,
// rounded as IEEE 754 says, as those of no library need be.
struct Known {
    Values parent;   // none: the points are predicted from 0
    Values squares;  // of multiples only
};

// Digests that go on with the values of all positions, in their order; null for those that nobody asks for.
struct ValueDigests {
    Hasher* values = nullptr;  // of the tensor
    Hasher* base = nullptr;    // of the parent
};

// What a parent says of the points: those nearest to its values, and under what to code the difference to them.
void lattice_predict(const Lattice& lattice, const Known& known, Hasher* base, int16_t* guesses, uint8_t* contexts,
                     Positions positions, unsigned threads);

struct Differences {
    std::vector<int32_t> escapes;  // too large for a byte
    uint8_t largest_context = 0;
    bool in_range = true;          // every code is one that a reader takes
    bool same = true;              // and stands for the value that was expected; a nan of 16 bits never does
};

// As lattice_predict of all positions, but what it leaves is the bytes to be coded; `expected` may be none.
Differences lattice_encode(const Lattice& lattice, Codes codes, const Known& known, Floats expected,
                           ValueDigests digests, uint8_t* contexts, uint8_t* tokens, unsigned threads);

// Where decoded codes and values go.
struct Decoded {
    uint8_t* codes;            // null where nobody asks for them but in the place of the guesses
    unsigned code_bytes = 2;   // 1 or 2
    float* values = nullptr;   // null where nobody asks for them
    Hasher* digest = nullptr;  // goes on with the values
};

struct DecodeResult {
    size_t escapes = 0;  // that were used
    bool narrow = true;  // every code fits into a byte; where not, the codes of one byte are of no use
};

// Codes, in the place of the guesses, and their values. Throws std::invalid_argument for tokens that need more escapes
// than there are, and for a code that no writer has.
DecodeResult lattice_decode(const Lattice& lattice, const uint8_t* tokens, const uint8_t* contexts,
                            const int32_t* escapes, size_t escape_count, const Values& squares, int16_t* guesses,
                            const Decoded& out, Positions positions, unsigned threads);

// A part of a tensor whose codes are decoded: what they are predicted from, and where they go. `codes` may be the
// parent's, if these have one byte and nobody needs them any more.
struct CodedPart {
    const Lattice* lattice;
    Known known;
    Positions positions;
    int8_t* codes;
};

// Codes of a part that do not all fit into bytes, from `start` of the part on; others of the part have their byte.
struct WideCodes {
    size_t part;
    uint64_t start;
    std::vector<int16_t> codes;
};

// The chunks of parts that lie one behind the other, which have no escapes, tile by tile: nothing between the coded
// bytes and the codes leaves the nearest cache. Throws std::invalid_argument for an escape, and for a code that no
// writer has; and what decode_tiles throws.
std::vector<WideCodes> lattice_decode_codes(const std::vector<CodedPart>& parts, const Model& model,
                                            const uint8_t* side, size_t side_size, const uint8_t* coded,
                                            size_t coded_size, const ChunkRange& range, unsigned threads);

// The values of runs of positions; `codes` holds those of the whole tensor, `squares` and `values` those of the runs.
void lattice_run_values(const Lattice& lattice, Codes codes, Floats squares, Runs runs, float* values);

// The values of some positions; `codes` and `squares` hold those of these alone. `digest` goes on with them; or null.
void lattice_values(const Lattice& lattice, Codes codes, const Values& squares, float* values, Hasher* digest,
                    Positions positions, unsigned threads);

}  // namespace shrinkpoint
