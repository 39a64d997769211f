// Groups contexts that share a table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.hpp"
#include "entropy/model.hpp"
#include "entropy/rans.hpp"

namespace shrinkpoint {

constexpr unsigned kMaxTables = 16;

// Symbol counts of every context: counts[context * 256 + symbol].
using ContextCounts = std::vector<uint32_t, UninitializedAllocator<uint32_t>>;

struct ContextTables {
    std::vector<uint8_t> map;              // context -> table
    std::vector<Frequencies> frequencies;  // at least one, at most kMaxTables
};

struct SymbolRange {
    unsigned first, last;
};

// Groups contexts so that the cost of the symbols plus the cost of the tables is small. If the counts are from a
// sample, every table has a frequency for each symbol of `cover` and for the escape of levels.
ContextTables cluster_contexts(const ContextCounts& counts, const SymbolRange* cover = nullptr);

// Bits that `counts` cost under `tables`, plus the bits of the tables.
double cost(const ContextCounts& counts, const ContextTables& tables);

// Writes the tables: docs/format.md, "ContextTables".
std::vector<uint8_t> write_tables(const ContextTables& tables);
// Reads the tables. Throws Corrupt or Truncated. `contexts` is the number that the model needs.
ContextTables read_tables(const uint8_t* data, size_t size, unsigned contexts);

}  // namespace shrinkpoint
