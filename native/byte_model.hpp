// Tokens::Codes: the symbol is the difference to the parent's byte, or the byte itself where there is none.
#pragma once
#include "tokens.hpp"

namespace shrinkpoint {

unsigned code_context_count(const Model& model, const Arrays& arrays);

// Fills contexts, and the prediction where there is one.
void code_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile);

// After code_contexts: symbols, and no extra bits.
void code_tokens(const Model& model, const uint8_t* values, size_t count, Tile& tile);

// After code_contexts, with the symbols known.
void code_values(const Model& model, size_t count, const Tile& tile, uint8_t* values);

}  // namespace shrinkpoint
