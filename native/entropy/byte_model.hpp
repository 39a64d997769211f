// Tokens::Codes: the symbol is the difference to the parent's byte, or the byte itself without a parent.
#pragma once
#include "entropy/tokens.hpp"

namespace shrinkpoint {

unsigned code_context_count(const Model& model, const Arrays& arrays);

// True if the parent's byte is the only context, up to the last context, which all larger bytes share.
bool is_under_parent(const Model& model, const Arrays& arrays);

// Fills the symbols of codes under the parent's.
void fold_codes(const uint8_t* values, const uint8_t* base, size_t count, uint8_t* symbols);

// Fills the contexts, and the prediction if there is one.
void code_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile);

// Fills the symbols after code_contexts. There are no extra bits.
void code_tokens(const Model& model, const uint8_t* values, size_t count, Tile& tile);

// Fills the values after code_contexts, from known symbols.
void code_values(const Model& model, size_t count, const Tile& tile, uint8_t* values);

}  // namespace shrinkpoint
