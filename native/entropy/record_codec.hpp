// A record's values <-> its two parts: `side` (tables, factors, chunk sizes) and `codes` (the chunks).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/buffer.hpp"
#include "entropy/model.hpp"

namespace shrinkpoint {

constexpr size_t kChunk = size_t{1} << 18;  // values; chunks are coded and decoded independently

struct EncodedRecord {
    Buffer side, codes;
};

// Estimated bits of the whole record, from every `stride`-th tile.
double estimate_bits(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, unsigned stride,
               unsigned threads);

EncodedRecord encode(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, size_t chunk,
             unsigned threads);

// Consecutive chunks of a record: those of [first, last), of `count` values in all.
struct ChunkRange {
    uint64_t count;
    size_t chunk, first, last;

    uint64_t start() const { return static_cast<uint64_t>(first) * chunk; }
    uint64_t values() const { return std::min<uint64_t>(static_cast<uint64_t>(last) * chunk, count) - start(); }
};

// As `decode`, but of these chunks alone: `codes`, `values` and all arrays are those of the range; `side` is that of
// the record, and factors are laid out for all of it. The range must lie inside the record.
void decode_chunks(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
                    const uint8_t* codes, size_t codes_size, uint8_t* values, const ChunkRange& range,
                    unsigned threads);

// What the contexts of bytes are, and what becomes of their symbols: tile by tile, in the order of a chunk.
class CodeTiles {
   public:
    virtual ~CodeTiles() = default;
    // Of `count` positions of the range from `start` on, at most kTile.
    virtual void fill_contexts(uint64_t start, size_t count, uint8_t* contexts) = 0;
    // The differences of the same positions, as fold_codes makes symbols of them.
    virtual void take(uint64_t start, size_t count, const uint8_t* symbols) = 0;
};
using MakeTiles = std::function<std::unique_ptr<CodeTiles>()>;

// As decode_chunks, of codes under a parent of which no array exists: every chunk at work has tiles of its own.
void decode_tiles(const Model& model, const uint8_t* side, size_t side_size, const uint8_t* codes, size_t codes_size,
                  const ChunkRange& range, const MakeTiles& make_tiles, unsigned threads);

// `factors` has its segments filled in where the model uses them. Throws Corrupt or Truncated; reads and writes only
// inside the given spans.
void decode(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
            const uint8_t* codes, size_t codes_size, uint8_t* values, uint64_t count, size_t chunk, unsigned threads);

}  // namespace shrinkpoint
