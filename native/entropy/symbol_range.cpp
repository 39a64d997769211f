#include "entropy/symbol_range.hpp"

#include <algorithm>

#include "base/simd.hpp"

namespace shrinkpoint {

namespace {

constexpr uint8_t kEscape = 255;  // symbol of a level out of range; deltas have fewer symbols

SHRINKPOINT_KERNEL(bool, all_in_range, (const SymbolRange& range, const uint8_t* symbols, size_t count),
                   (range, symbols, count)) {
    const auto first = static_cast<uint8_t>(range.first), size = static_cast<uint8_t>(range.last - range.first);
    uint8_t outside = 0;
    for (size_t i = 0; i < count; ++i)
        outside = static_cast<uint8_t>(outside | ((static_cast<uint8_t>(symbols[i] - first) > size) &
                                                  (symbols[i] != kEscape)));
    return outside == 0;
}

}  // namespace

SymbolRange range_of(const ContextCounts& counts) {
    unsigned first = kEscape, last = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        const auto symbol = static_cast<unsigned>(i % 256);
        if (counts[i] == 0 || symbol == kEscape) continue;
        first = std::min(first, symbol);
        last = std::max(last, symbol);
    }
    return first > last ? SymbolRange{0, 0} : SymbolRange{first, last};
}

SymbolRange widened(const Model& model, const SymbolRange& range) {
    const unsigned margin = model.tokens == Tokens::Level ? 2u << model.fine : 8;  // two octaves, for deltas as well
    const unsigned first = model.tokens == Tokens::Level ? range.first - std::min(range.first, margin) : 0;
    return {first, std::min(range.last + margin, kEscape - 1u)};
}

bool covers(const SymbolRange& range, const uint8_t* symbols, size_t count) {
    return all_in_range(range, symbols, count);
}

void escape(const Model& model, const SymbolRange& range, const uint8_t* values, uint64_t start, size_t count,
            Tile& tile) {
    if (tile.uniform != kMixedWidths) std::fill_n(tile.extra_bits, count, tile.uniform);
    tile.uniform = kMixedWidths;
    const unsigned bytes = model.width / 8;
    for (size_t i = 0; i < count; ++i) {
        const uint8_t symbol = tile.symbols[i];
        if ((symbol >= range.first && symbol <= range.last) || symbol == kEscape) continue;
        uint64_t value = 0;
        std::memcpy(&value, values + (start + i) * bytes, bytes);
        tile.symbols[i] = kEscape;
        tile.extra_bits[i] = static_cast<uint8_t>(model.width);
        if (model.width == 64)
            tile.extra[i] = value;
        else
            reinterpret_cast<uint32_t*>(tile.extra)[i] = static_cast<uint32_t>(value);
    }
}

}  // namespace shrinkpoint
