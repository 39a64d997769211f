// Encodes a record's values into two parts and back: `side` (tables, factors, chunk sizes) and `codes` (the chunks).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/buffer.hpp"
#include "entropy/model.hpp"

namespace shrinkpoint {

constexpr size_t kChunk = size_t{1} << 18;  // values; chunks are coded and decoded independently

struct EncodedRecord {
    Buffer side, codes;
};

// Estimates the bits of the whole record from every `stride`-th tile.
double estimate_bits(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, unsigned stride,
               unsigned threads);

EncodedRecord encode(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, size_t chunk,
             unsigned threads);

// The chunks [first, last) of a record of `count` values.
struct ChunkRange {
    uint64_t count;
    size_t chunk, first, last;

    uint64_t start() const { return static_cast<uint64_t>(first) * chunk; }
    uint64_t values() const { return std::min<uint64_t>(static_cast<uint64_t>(last) * chunk, count) - start(); }
};

// Same as `decode` for these chunks alone. `codes`, `values` and all arrays hold only the range. `side` is the whole
// record's, and factors are laid out for all of it. The range must lie inside the record.
void decode_chunks(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
                    const uint8_t* codes, size_t codes_size, uint8_t* values, const ChunkRange& range,
                    unsigned threads);

// Supplies the tables of a chunk's bytes and takes their symbols, tile by tile in the order of the chunk.
class CodeTiles {
   public:
    virtual ~CodeTiles() = default;
    // Predicts `count` positions of the range from `start` on, at most kTile, and fills in the table of each. `map` has
    // the table of each context; the last one is that of all further contexts. `tables` is null if there is one alone.
    virtual void predict(uint64_t start, size_t count, const std::vector<uint8_t>& map, uint8_t* tables) = 0;
    // Takes the differences of the same positions, as the symbols that fold_codes makes.
    virtual void take(uint64_t start, size_t count, const uint8_t* symbols) = 0;
};
using MakeTiles = std::function<std::unique_ptr<CodeTiles>()>;

// Same as decode_chunks for codes under a parent that exists in no array. Each chunk in progress has its own tiles.
void decode_tiles(const Model& model, const uint8_t* side, size_t side_size, const uint8_t* codes, size_t codes_size,
                  const ChunkRange& range, const MakeTiles& make_tiles, unsigned threads);

// Decodes a record. `factors` has its segments filled in if the model uses them. Throws Corrupt or Truncated; reads and
// writes only inside the given spans.
void decode(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
            const uint8_t* codes, size_t codes_size, uint8_t* values, uint64_t count, size_t chunk, unsigned threads);

}  // namespace shrinkpoint
