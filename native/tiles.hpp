// Stretches of a record: chunks, and the tiles in which they are worked through.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tokens.hpp"

namespace shrinkpoint {

inline size_t chunk_count(uint64_t count, size_t chunk) { return static_cast<size_t>((count + chunk - 1) / chunk); }

struct Span {
    uint64_t start;
    size_t count;
};

// At most `length` positions from the start of the index-th chunk.
inline Span span_of(size_t index, uint64_t count, size_t chunk, size_t length) {
    const uint64_t start = static_cast<uint64_t>(index) * chunk;
    return {start, static_cast<size_t>(std::min<uint64_t>(length, count - start))};
}

inline unsigned bytes_of(const Model& model) { return model.width / 8; }

// The contexts of tile after tile. Where they are the same everywhere (a level without factors and companion), the
// first whole tile's serve all others.
class Contexts {
   public:
    Contexts(const Model& model, const Arrays& arrays)
        : model_(model),
          arrays_(arrays),
          vary_(model.tokens == Tokens::Delta || arrays.factors != nullptr || model.companion != Companion::None ||
                (model.tokens == Tokens::Codes && context_count(model, arrays) > 1)) {}

    // Whether positions differ in their contexts.
    bool vary() const { return vary_; }

    void fill(uint64_t start, size_t count, Tile& tile) {
        if (!vary_ && filled_) return;
        contextualise(model_, arrays_, start, count, tile);
        filled_ = count == kTile;
    }

   private:
    const Model& model_;
    const Arrays& arrays_;
    const bool vary_;
    bool filled_ = false;
};

}  // namespace shrinkpoint
