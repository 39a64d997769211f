// The range of symbols that tables made from a sample can code. All other symbols become escapes.
#pragma once
#include "entropy/context_clustering.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

constexpr uint64_t kSampleSize = 1 << 16;  // tables are made from at least so many values
constexpr uint64_t kMaxStride = 64;        // largest stride between sampled tiles

constexpr SymbolRange kAllSymbols{0, 255};

// Returns the least and the largest symbol counted, without the escape of levels.
SymbolRange range_of(const ContextCounts& counts);

// Widens the range on both sides by the symbols that values outside the sample may have.
SymbolRange widened(const Model& model, const SymbolRange& range);

// True if all symbols lie in the range; for levels the escape counts as inside.
bool covers(const SymbolRange& range, const uint8_t* symbols, size_t count);

// Turns the levels of values[start, start + count) into escapes where their symbols lie outside the range.
void escape(const Model& model, const SymbolRange& range, const uint8_t* values, uint64_t start, size_t count,
            Tile& tile);

}  // namespace shrinkpoint
