// A record's values <-> its two parts: `side` (tables, factors, chunk sizes) and `codes` (the chunks).
#pragma once
#include <cstddef>
#include <cstdint>

#include "buffer.hpp"
#include "model.hpp"

namespace shrinkpoint {

constexpr size_t kChunk = size_t{1} << 18;  // values; chunks are coded and decoded independently

struct Coded {
    Buffer side, codes;
};

// Estimated bits of the whole record, from every `stride`-th tile.
double measure(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, unsigned stride,
               unsigned threads);

Coded encode(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, size_t chunk,
             unsigned threads);

// `factors` has its segments filled in where the model uses them. Throws Corrupt or Truncated; reads and writes only
// inside the given spans.
void decode(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
            const uint8_t* codes, size_t codes_size, uint8_t* values, uint64_t count, size_t chunk, unsigned threads);

}  // namespace shrinkpoint
