// Tokens::Codes: the symbol is the difference to the parent's byte, or the byte itself where there is none.
#pragma once
#include "entropy/tokens.hpp"

namespace shrinkpoint {

unsigned code_context_count(const Model& model, const Arrays& arrays);

// Whether a code's only context is the parent's, up to the last of the contexts, which stands for all beyond it.
bool is_under_parent(const Model& model, const Arrays& arrays);

// The symbols of codes under the parent's.
void fold_codes(const uint8_t* values, const uint8_t* base, size_t count, uint8_t* symbols);

// Fills contexts, and the prediction where there is one.
void code_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile);

// After code_contexts: symbols, and no extra bits.
void code_tokens(const Model& model, const uint8_t* values, size_t count, Tile& tile);

// After code_contexts, with the symbols known.
void code_values(const Model& model, size_t count, const Tile& tile, uint8_t* values);

}  // namespace shrinkpoint
