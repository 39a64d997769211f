// The symbols for which tables made from a sample have a frequency, and what becomes of all others.
#pragma once
#include "entropy/context_clustering.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

constexpr uint64_t kSampleSize = 1 << 16;  // values at least from which tables are made
constexpr uint64_t kMaxStride = 64;        // between the tiles of the sample

constexpr SymbolRange kAllSymbols{0, 255};

// The least and the largest symbol counted, escapes of levels apart.
SymbolRange range_of(const ContextCounts& counts);

// The range with the symbols on both sides that other values may have.
SymbolRange widened(const Model& model, const SymbolRange& range);

// Whether all symbols lie in the range; of levels the escape as well.
bool covers(const SymbolRange& range, const uint8_t* symbols, size_t count);

// Makes escapes of the levels of values[start, start + count) whose symbols lie outside of the range.
void escape(const Model& model, const SymbolRange& range, const uint8_t* values, uint64_t start, size_t count,
            Tile& tile);

}  // namespace shrinkpoint
