// Turns codes of a lattice into the bytes that are entropy-coded, and back.
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

// Float32 values: an array, codes that are decoded tile by tile, or none. `lattice` is the whole tensor's; arrays hold
// only the positions in question.
struct Values {
    Floats floats;
    const Lattice* lattice = nullptr;
    Codes codes;

    bool none() const { return floats.data == nullptr && lattice == nullptr; }
};

// The data that points are predicted from and decoded with. Steps are multiplied by the square roots of `squares`,
// rounded as IEEE 754 says; library roots may differ.
struct Known {
    Values parent;   // without: points are predicted from 0
    Values squares;  // for lattices of multiples only
};

// Digests to update with the values of all positions, in order; null if not needed.
struct ValueDigests {
    Hasher* values = nullptr;  // of the tensor's values
    Hasher* base = nullptr;    // of the parent's values
};

// Predicts points from their parent: the points nearest to its values, and the contexts to code differences under.
void lattice_predict(const Lattice& lattice, const Known& known, Hasher* base, int16_t* guesses, uint8_t* contexts,
                     Positions positions, unsigned threads);

struct Differences {
    std::vector<int32_t> escapes;  // differences too large for a byte
    uint8_t largest_context = 0;
    bool in_range = true;          // readers accept every code
    bool same = true;              // every decoded value is the expected one; a 16-bit nan never is
};

// Same as lattice_predict for all positions, but produces the bytes to code. `expected` may be none.
//
// A token is context + (code - guess) modulo 256: code 3 with guess 4 in context 36 is the byte 35. A difference that
// does not fit in [-127, 127] is the escape -128, and the difference itself goes to `escapes`.
Differences lattice_encode(const Lattice& lattice, Codes codes, const Known& known, Floats expected,
                           ValueDigests digests, uint8_t* contexts, uint8_t* tokens, unsigned threads);

// Destinations of decoded codes and values.
struct Decoded {
    uint8_t* codes;            // null if codes are only needed in place of the guesses
    unsigned code_bytes = 2;   // 1 or 2
    float* values = nullptr;   // null if not needed
    Hasher* digest = nullptr;  // updated with the values; or null
};

struct DecodeResult {
    size_t escapes = 0;  // number of escapes used
    bool narrow = true;  // every code fits in a byte; otherwise one-byte codes are not valid
};

// Decodes codes, in place of the guesses, and their values. Throws std::invalid_argument for tokens that need more
// escapes than there are, and for a code that no writer produces.
DecodeResult lattice_decode(const Lattice& lattice, const uint8_t* tokens, const uint8_t* contexts,
                            const int32_t* escapes, size_t escape_count, const Values& squares, int16_t* guesses,
                            const Decoded& out, Positions positions, unsigned threads);

// A part of a tensor to decode: its prediction and its destination. `codes` may be the parent's codes if these have one
// byte and are not needed any more.
struct CodedPart {
    const Lattice* lattice;
    Known known;
    Positions positions;
    int8_t* codes;
};

// Codes that do not all fit in bytes, from `start` of the part on. Other codes of the part are bytes.
struct WideCodes {
    size_t part;
    uint64_t start;
    std::vector<int16_t> codes;
};

// Decodes chunks of consecutive parts without escapes, tile by tile: nothing between the coded bytes and the codes
// leaves the nearest cache. Throws std::invalid_argument for an escape and for a code that no writer produces, and
// everything that decode_tiles throws.
std::vector<WideCodes> lattice_decode_codes(const std::vector<CodedPart>& parts, const Model& model,
                                            const uint8_t* side, size_t side_size, const uint8_t* coded,
                                            size_t coded_size, const ChunkRange& range, unsigned threads);

// Decodes runs of positions. `codes` holds the whole tensor, `squares` and `values` only the runs.
void lattice_run_values(const Lattice& lattice, Codes codes, Floats squares, Runs runs, float* values);

// Updates a digest with all decoded values, in this thread.
void lattice_digest(const Lattice& lattice, Codes codes, Hasher& digest);

// True if the decoded values of the first `count` positions have these bits.
bool lattice_starts_with(const Lattice& lattice, Codes codes, const float* values, uint64_t count);

// Decodes some positions. `codes` and `squares` hold only these. `digest` is updated with the values, or null.
void lattice_values(const Lattice& lattice, Codes codes, const Values& squares, float* values, Hasher* digest,
                    Positions positions, unsigned threads);

}  // namespace shrinkpoint
