#include "entropy/byte_model.hpp"

#include <algorithm>
#include <cstring>

#include "base/bits.hpp"
#include "entropy/int_types.hpp"

namespace shrinkpoint {

namespace {

constexpr unsigned kMaxAdamRatios = 32, kFewestPushes = 8;

// How contexts are divided among the parent's byte and the size and direction of Adam's step.
struct Layout {
    unsigned largest;  // largest byte with a context of its own: unused contexts would cost a bit of the map
    unsigned pushes;   // contexts for each byte; 1 without moments
};

Layout layout_of(const Model& model, const Arrays& arrays) {
    const unsigned largest_code = model.top > 0 ? static_cast<unsigned>(model.top) : 255;
    const unsigned largest = model.predictor == Predictor::Base ? largest_code : 0;
    if (!arrays.moments()) return {largest, 1};
    unsigned pushes = kMaxAdamRatios;
    while (pushes > kFewestPushes && (largest + 1) * pushes > kMaxContexts) pushes /= 2;
    return {std::min(largest, kMaxContexts / pushes - 1), pushes};
}

SHRINKPOINT_KERNEL(void, hold_codes, (const uint8_t* base, size_t count, unsigned largest, uint16_t* contexts),
                   (base, count, largest, contexts)) {
    const auto most = static_cast<uint16_t>(largest);
    for (size_t i = 0; i < count; ++i) contexts[i] = std::min<uint16_t>(base[i], most);
}

SHRINKPOINT_KERNEL(void, add_pushes,
                   (const float* moment1, const float* moment2, size_t count, unsigned pushes, uint16_t* contexts),
                   (moment1, moment2, count, pushes, contexts)) {
    const unsigned drop = pushes == 32 ? 0 : pushes == 16 ? 1 : 2;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t m = bits_of(moment1[i]), v = bits_of(moment2[i]);
        const uint32_t pushed = static_cast<uint32_t>(adam_ratio_class(m, v)) >> drop << 1 | m >> 31;
        contexts[i] = static_cast<uint16_t>(contexts[i] * pushes + pushed);
    }
}

SHRINKPOINT_KERNEL(void, unfold, (const uint8_t* symbols, const uint8_t* base, size_t count, uint8_t* values),
                   (symbols, base, count, values)) {
    for (size_t i = 0; i < count; ++i) {
        const auto negative = static_cast<uint8_t>(0 - (symbols[i] & 1));
        values[i] = static_cast<uint8_t>(base[i] + ((symbols[i] >> 1) ^ negative));
    }
}

const uint8_t* prediction_of(const Tile& tile) { return static_cast<const uint8_t*>(tile.prediction); }

}  // namespace

// Differences modulo 256, folded: 0, -1, 1, -2, 2 become the symbols 0, 1, 2, 3, 4. Contexts of neighbouring codes then
// have similar symbols and share a table; there are fewer tables than codes.
SHRINKPOINT_KERNEL(void, fold_codes, (const uint8_t* values, const uint8_t* base, size_t count, uint8_t* symbols),
                   (values, base, count, symbols)) {
    for (size_t i = 0; i < count; ++i) {
        const auto difference = static_cast<uint8_t>(values[i] - base[i]);
        const auto negative = static_cast<uint8_t>(0 - (difference >> 7));
        symbols[i] = static_cast<uint8_t>(static_cast<uint8_t>(difference << 1) ^ negative);
    }
}

bool is_under_parent(const Model& model, const Arrays& arrays) {
    return model.tokens == Tokens::Codes && model.predictor == Predictor::Base && !arrays.moments();
}

unsigned code_context_count(const Model& model, const Arrays& arrays) {
    const Layout layout = layout_of(model, arrays);
    return (layout.largest + 1) * layout.pushes;
}

void code_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile) {
    const Layout layout = layout_of(model, arrays);
    if (model.predictor == Predictor::Base) {
        tile.prediction = arrays.base + start;
        hold_codes(arrays.base + start, count, layout.largest, tile.contexts);
    } else {
        std::fill_n(tile.contexts, count, uint16_t{0});
    }
    if (arrays.moments())
        add_pushes(arrays.moment1 + start, arrays.moment2 + start, count, layout.pushes, tile.contexts);
}

void code_tokens(const Model& model, const uint8_t* values, size_t count, Tile& tile) {
    tile.uniform = 0;
    if (model.predictor == Predictor::Base)
        fold_codes(values, prediction_of(tile), count, tile.symbols);
    else
        std::memcpy(tile.symbols, values, count);
}

void code_values(const Model& model, size_t count, const Tile& tile, uint8_t* values) {
    if (model.predictor == Predictor::Base)
        unfold(tile.symbols, prediction_of(tile), count, values);
    else
        std::memcpy(values, tile.symbols, count);
}

}  // namespace shrinkpoint
