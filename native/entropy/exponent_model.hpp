// Tokens::Level: the symbol is the logarithm of the magnitude minus a predicted logarithm. Included by tokens.cpp only.
#pragma once
#include <algorithm>

#include "base/bits.hpp"
#include "entropy/int_types.hpp"
#include "entropy/predict.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

constexpr unsigned kResidualContexts = 48;  // companion's level less the predicted one, half levels of the range
constexpr unsigned kCompanionZero = kResidualContexts, kDeadContext = kResidualContexts + 1;
constexpr unsigned kLevelContexts = kResidualContexts + 2;
constexpr int kZeroSymbol = 0, kEscapeSymbol = 255;

// A level out of range counts as one that no prediction comes near.
template <typename U>
SHRINKPOINT_INLINE uint32_t held_level(U level) {
    if constexpr (sizeof(U) < 4)
        return level;
    else
        return static_cast<uint32_t>(std::min<U>(level, U{1} << 30));
}

// Wraps around. Where a factor is dead the difference can be any number and is not used.
SHRINKPOINT_INLINE int32_t less(uint32_t level, int32_t predicted) {
    return static_cast<int32_t>(level - static_cast<uint32_t>(predicted));
}

// Contexts from the companion's residuals. A dead factor has a context of its own, and the bias is its level. Masks
// instead of conditions, which would become branches around the stores.
template <typename Residual>
SHRINKPOINT_INLINE void residual_contexts(const Model& model, size_t count, Tile& tile, Residual context_of) {
    int32_t* __restrict levels = tile.levels;
    uint16_t* __restrict contexts = tile.contexts;
    const int32_t bias = model.bias;
    for (size_t i = 0; i < count; ++i) {
        const int32_t level = levels[i], dead = -static_cast<int32_t>(level == kZeroLevel);
        const int32_t context = context_of(i, level);
        contexts[i] = static_cast<uint16_t>(context ^ ((context ^ static_cast<int32_t>(kDeadContext)) & dead));
        levels[i] = level ^ ((level ^ bias) & dead);
    }
}

SHRINKPOINT_INLINE int32_t residual_context(bool zero, int32_t residual) {
    return zero ? static_cast<int32_t>(kCompanionZero)
                : clamp_int(residual, 0, static_cast<int32_t>(kResidualContexts) - 1);
}

template <typename U>
SHRINKPOINT_INLINE void level_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count,
                                       Tile& tile) {
    if (arrays.factors != nullptr && !arrays.factors->empty())
        predict_levels(*arrays.factors, arrays.factors->origin + start, count, tile.levels);
    else
        std::fill_n(tile.levels, count, model.bias);
    const unsigned drop = model.mantissa - model.fine;
    if (model.companion == Companion::Base) {
        const U* base = reinterpret_cast<const U*>(arrays.base) + start;
        residual_contexts(model, count, tile, [=](size_t i, int32_t level) {
            const U magnitude = base[i] & magnitude_mask<U>;
            const int32_t residual = less(held_level<U>(static_cast<U>(magnitude >> drop)) + 24, level);
            return residual_context(magnitude == 0, residual);
        });
    } else if (model.companion == Companion::Moment1) {
        const float* moment = arrays.moment1 + start;
        const uint32_t half = 127u << model.fine;
        const unsigned fine = 23 - model.fine;
        residual_contexts(model, count, tile, [=](size_t i, int32_t level) {
            const uint32_t magnitude = bits_of(moment[i]) & 0x7fffffffu;
            const int32_t residual = less(2 * held_level(magnitude >> fine) - half, level) / 2 + 24;
            return residual_context(magnitude == 0, residual);
        });
    } else {
        residual_contexts(model, count, tile, [](size_t, int32_t) { return 0; });
    }
}

// Sets the widths that follow from the symbols alone: most tiles have neither a zero nor an escape.
SHRINKPOINT_INLINE void level_widths(const Model& model, size_t count, Tile& tile) {
    const auto normal = static_cast<uint8_t>(model.mantissa - model.fine - model.shift + model.has_sign);
    const uint8_t* __restrict symbols = tile.symbols;
    uint8_t special = 0;
    for (size_t i = 0; i < count; ++i)
        special = static_cast<uint8_t>(special | (static_cast<uint8_t>(symbols[i] + 1) < 2 ? 1 : 0));
    tile.uniform = special == 0 ? normal : kMixedWidths;
    if (special == 0) return;
    uint8_t* __restrict extra_bits = tile.extra_bits;
    const uint8_t zero = model.has_sign, escape = static_cast<uint8_t>(model.width);
    for (size_t i = 0; i < count; ++i)
        extra_bits[i] = symbols[i] == kZeroSymbol ? zero : symbols[i] == kEscapeSymbol ? escape : normal;
}

template <typename U>
SHRINKPOINT_INLINE void level_tokens(const Model& model, const uint8_t* all, uint64_t start, size_t count, Tile& tile) {
    const U* __restrict values = reinterpret_cast<const U*>(all) + start;
    Extra<U>* __restrict extra = reinterpret_cast<Extra<U>*>(tile.extra);
    uint8_t* __restrict symbols = tile.symbols;
    const int32_t* __restrict levels = tile.levels;
    const unsigned drop = model.mantissa - model.fine, shift = model.shift, low = drop - shift;
    const auto low_mask = static_cast<Extra<U>>((uint64_t{1} << low) - 1);
    const unsigned has_sign = model.has_sign;
    for (size_t i = 0; i < count; ++i) {
        const auto u = static_cast<Extra<U>>(values[i]);
        const Extra<U> magnitude = u & magnitude_mask<U>;
        const Extra<U> sign = (u >> (width_of<U> - 1)) & has_sign;
        const int32_t distance = less(held_level<Extra<U>>(magnitude >> drop) + 128, levels[i]);
        const bool zero = magnitude == 0, escape = static_cast<uint32_t>(distance - 1) > 253;
        const Extra<U> normal = sign << low | ((magnitude >> shift) & low_mask);
        symbols[i] = static_cast<uint8_t>(zero ? kZeroSymbol : escape ? kEscapeSymbol : distance);
        extra[i] = zero ? sign : escape ? u : normal;
    }
    level_widths(model, count, tile);
}

template <typename U>
SHRINKPOINT_INLINE void level_values(const Model& model, uint64_t start, size_t count, const Tile& tile, uint8_t* all) {
    U* __restrict values = reinterpret_cast<U*>(all) + start;
    const Extra<U>* __restrict extra = reinterpret_cast<const Extra<U>*>(tile.extra);
    const uint8_t* __restrict symbols = tile.symbols;
    const int32_t* __restrict levels = tile.levels;
    const unsigned drop = model.mantissa - model.fine, shift = model.shift, low = drop - shift;
    const auto low_mask = static_cast<Extra<U>>((uint64_t{1} << low) - 1);
    if (tile.uniform != kMixedWidths) {
        for (size_t i = 0; i < count; ++i) {
            const auto level = static_cast<Extra<U>>(levels[i] + symbols[i] - 128);
            const Extra<U> magnitude = level << drop | (extra[i] & low_mask) << shift;
            values[i] = static_cast<U>(magnitude | (extra[i] >> low) << (width_of<U> - 1));
        }
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        const int32_t symbol = symbols[i];
        const Extra<U> bits = extra[i];
        const auto level = static_cast<Extra<U>>(levels[i] + symbol - 128);
        const Extra<U> magnitude = level << drop | (bits & low_mask) << shift;
        const Extra<U> normal = magnitude | (bits >> low) << (width_of<U> - 1);
        const Extra<U> zero = bits << (width_of<U> - 1);
        values[i] = static_cast<U>(symbol == kZeroSymbol ? zero : symbol == kEscapeSymbol ? bits : normal);
    }
}

}  // namespace shrinkpoint
