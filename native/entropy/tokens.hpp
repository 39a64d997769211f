// Turns values into tokens and back, for a short run of positions at a time.
#pragma once
#include "base/bit_writer.hpp"
#include "entropy/bit_fields.hpp"
#include "entropy/model.hpp"

namespace shrinkpoint {

constexpr size_t kTile = 2048;

// `extra` holds uint64_t for 64-bit values and uint32_t for narrower ones (half the memory, twice the lanes).
// `predicted` holds integers as wide as the values. Both are packed at the front.
struct alignas(64) Tile {
    uint64_t extra[kTile];
    uint64_t predicted[kTile];  // Delta, unless the prediction is the base itself
    const void* prediction;     // Delta and Codes: the predicted values
    int32_t levels[kTile];      // Level: predicted
    uint32_t squares[kTile];
    uint16_t contexts[kTile];
    uint8_t symbols[kTile];
    uint8_t extra_bits[kTile];  // if `uniform` is kMixedWidths
    uint8_t uniform;            // the number of extra bits of every position
};

// The hint that the difference of two arrays gives about a third array: half its bit length and its sign, 5 bits in
// all.
void difference_classes(const Model& model, const uint8_t* values, const uint8_t* others, size_t count,
                        uint8_t* classes);

// Number of contexts that a model distinguishes with these arrays, at most kMaxContexts.
unsigned context_count(const Model& model, const Arrays& arrays);

// Fills contexts and everything else that depends only on what the decoder already holds. Planes need nothing.
void contextualise(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile);

// Fills symbols, extra and extra_bits of values[start, start + count) after contextualise.
void tokenise(const Model& model, const uint8_t* values, uint64_t start, size_t count, Tile& tile);

// Appends the extra bits of `count` positions after tokenise.
void write_extra(const Model& model, const Tile& tile, size_t count, BitWriter& bits);

// The sum of the first `count` extra_bits.
uint64_t extra_sum(const Tile& tile, size_t count);

// Computes the number of extra bits of each position after contextualise, from known symbols. Returns their sum.
uint64_t extra_widths(const Model& model, size_t count, Tile& tile);

// Writes values[start, start + count) after extra_widths, from the symbols and the bits at `position` of `extra`, which
// must hold as many as extra_widths returned.
void untokenise(const Model& model, const BitSpan& extra, uint64_t position, uint64_t start, size_t count, Tile& tile,
                uint8_t* values);

}  // namespace shrinkpoint
