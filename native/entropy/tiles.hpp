// Tiles of a record and their contexts.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/parallel.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

inline unsigned bytes_of(const Model& model) { return model.width / 8; }

// Contexts of tile after tile. If they are the same everywhere (levels without factors and companion), the contexts of
// the first whole tile serve all others.
class Contexts {
   public:
    Contexts(const Model& model, const Arrays& arrays)
        : model_(model),
          arrays_(arrays),
          vary_(model.tokens == Tokens::Delta || arrays.factors != nullptr || model.companion != Companion::None ||
                (model.tokens == Tokens::Codes && context_count(model, arrays) > 1)) {}

    // True if contexts differ between positions.
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
