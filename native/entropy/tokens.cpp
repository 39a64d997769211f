#include "entropy/tokens.hpp"

#include <algorithm>

#include "entropy/bit_fields.hpp"
#include "entropy/byte_model.hpp"
#include "entropy/delta_model.hpp"
#include "entropy/exponent_model.hpp"
#include "entropy/int_types.hpp"
#include "entropy/predict.hpp"

namespace shrinkpoint {

namespace {

// ---- one instantiation a width, each compiled for several instruction sets ---------------------------------------

template <typename U>
SHRINKPOINT_INLINE void contextualise_as(const Model& model, const Arrays& arrays, uint64_t start, size_t count,
                                         Tile& tile) {
    if (model.tokens == Tokens::Level) return level_contexts<U>(model, arrays, start, count, tile);
    delta_predict<U>(model, arrays, start, count, tile);
    if (model.predictor == Predictor::Square) return square_contexts(count, tile);
    delta_contexts<U>(model, arrays, start, count, tile);
}

template <typename U>
SHRINKPOINT_INLINE void tokenise_as(const Model& model, const uint8_t* values, uint64_t start, size_t count,
                                    Tile& tile) {
    if (model.tokens == Tokens::Level) return level_tokens<U>(model, values, start, count, tile);
    delta_tokens<U>(model, values, start, count, tile);
}

template <typename U>
SHRINKPOINT_INLINE void untokenise_as(const Model& model, uint64_t start, size_t count, const Tile& tile,
                                      uint8_t* values) {
    if (model.tokens == Tokens::Level) return level_values<U>(model, start, count, tile, values);
    delta_values<U>(model, start, count, tile, values);
}

#define SHRINKPOINT_FOR_WIDTH(U)                                                                                   \
    SHRINKPOINT_KERNEL(void, contextualise_##U,                                                                    \
                       (const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile),       \
                       (model, arrays, start, count, tile)) {                                                      \
        contextualise_as<U>(model, arrays, start, count, tile);                                                    \
    }                                                                                                              \
    SHRINKPOINT_KERNEL(void, tokenise_##U,                                                                         \
                       (const Model& model, const uint8_t* values, uint64_t start, size_t count, Tile& tile),      \
                       (model, values, start, count, tile)) {                                                      \
        tokenise_as<U>(model, values, start, count, tile);                                                         \
    }                                                                                                              \
    SHRINKPOINT_KERNEL(void, untokenise_##U,                                                                       \
                       (const Model& model, uint64_t start, size_t count, Tile& tile, uint8_t* values),            \
                       (model, start, count, tile, values)) {                                                      \
        untokenise_as<U>(model, start, count, tile, values);                                                       \
    }

SHRINKPOINT_FOR_WIDTH(uint8_t)
SHRINKPOINT_FOR_WIDTH(uint16_t)
SHRINKPOINT_FOR_WIDTH(uint32_t)
SHRINKPOINT_FOR_WIDTH(uint64_t)
#undef SHRINKPOINT_FOR_WIDTH

SHRINKPOINT_KERNEL(uint64_t, sum_widths, (const uint8_t* widths, size_t count), (widths, count)) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; ++i) sum += widths[i];
    return sum;
}

SHRINKPOINT_KERNEL(void, fill_widths, (const Model& model, size_t count, Tile& tile), (model, count, tile)) {
    if (model.tokens == Tokens::Level)
        level_widths(model, count, tile);
    else
        delta_widths(count, tile);
}

}  // namespace

namespace {

template <typename U>
void difference_classes_as(const Model& model, const uint8_t* values, const uint8_t* others, size_t count,
                           uint8_t* classes) {
    const Order<U> order(model);
    const unsigned unused = 8 * sizeof(Extra<U>) - (width_of<U> - model.shift);
    for (size_t i = 0; i < count; ++i) {
        const Extra<U> a = order.ordered(reinterpret_cast<const U*>(values)[i]);
        const Extra<U> b = order.ordered(reinterpret_cast<const U*>(others)[i]);
        const auto d = static_cast<std::make_signed_t<Extra<U>>>((a - b) << unused) >> unused;
        const uint64_t n = static_cast<uint64_t>(d < 0 ? ~d : d);
        const unsigned bits = n == 0 ? 0 : 64 - static_cast<unsigned>(__builtin_clzll(n));
        classes[i] = static_cast<uint8_t>(std::min(bits / 2, 15u) << 1 | (d < 0));
    }
}

}  // namespace

void difference_classes(const Model& model, const uint8_t* values, const uint8_t* others, size_t count,
                        uint8_t* classes) {
    switch (model.width) {
        case 8: return difference_classes_as<uint8_t>(model, values, others, count, classes);
        case 16: return difference_classes_as<uint16_t>(model, values, others, count, classes);
        case 32: return difference_classes_as<uint32_t>(model, values, others, count, classes);
        default: return difference_classes_as<uint64_t>(model, values, others, count, classes);
    }
}

unsigned context_count(const Model& model, const Arrays& arrays) {
    switch (model.tokens) {
        case Tokens::Level: return kLevelContexts;
        case Tokens::Delta: return model.mantissa == 0 ? 1 : kMaxContexts;
        case Tokens::Planes: return model.width / 8;
        case Tokens::Codes: return code_context_count(model, arrays);
    }
    return 1;
}

void contextualise(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile) {
    if (model.tokens == Tokens::Codes) return code_contexts(model, arrays, start, count, tile);
    auto* predicted = reinterpret_cast<uint32_t*>(tile.predicted);
    if (model.predictor == Predictor::Adam)
        predict_adam(model, reinterpret_cast<const float*>(arrays.base) + start, arrays.moment1 + start,
                     arrays.moment2 + start, count, predicted);
    else if (model.predictor == Predictor::Square)
        predict_square(model, reinterpret_cast<const float*>(arrays.base) + start, arrays.moment1 + start,
                       arrays.moment1_base + start, count, predicted, tile.squares);
    switch (model.width) {
        case 8: return contextualise_uint8_t(model, arrays, start, count, tile);
        case 16: return contextualise_uint16_t(model, arrays, start, count, tile);
        case 32: return contextualise_uint32_t(model, arrays, start, count, tile);
        default: return contextualise_uint64_t(model, arrays, start, count, tile);
    }
}

void tokenise(const Model& model, const uint8_t* values, uint64_t start, size_t count, Tile& tile) {
    if (model.tokens == Tokens::Codes) return code_tokens(model, values + start, count, tile);
    switch (model.width) {
        case 8: return tokenise_uint8_t(model, values, start, count, tile);
        case 16: return tokenise_uint16_t(model, values, start, count, tile);
        case 32: return tokenise_uint32_t(model, values, start, count, tile);
        default: return tokenise_uint64_t(model, values, start, count, tile);
    }
}

void write_extra(const Model& model, const Tile& tile, size_t count, BitWriter& bits) {
    if (model.width == 64)
        store_fields(tile.extra, tile.extra_bits, tile.uniform, count, bits);
    else
        store_fields(reinterpret_cast<const uint32_t*>(tile.extra), tile.extra_bits, tile.uniform, count, bits);
}

uint64_t extra_sum(const Tile& tile, size_t count) {
    if (tile.uniform != kMixedWidths) return uint64_t{tile.uniform} * count;
    return sum_widths(tile.extra_bits, count);
}

uint64_t extra_widths(const Model& model, size_t count, Tile& tile) {
    if (model.tokens == Tokens::Codes)
        tile.uniform = 0;
    else
        fill_widths(model, count, tile);
    return extra_sum(tile, count);
}

void untokenise(const Model& model, const BitSpan& extra, uint64_t position, uint64_t start, size_t count, Tile& tile,
                uint8_t* values) {
    if (model.tokens == Tokens::Codes) return code_values(model, count, tile, values + start);
    if (model.width == 64)
        load_fields(extra, position, tile.extra_bits, tile.uniform, count, tile.extra);
    else
        load_fields(extra, position, tile.extra_bits, tile.uniform, count, reinterpret_cast<uint32_t*>(tile.extra));
    switch (model.width) {
        case 8: return untokenise_uint8_t(model, start, count, tile, values);
        case 16: return untokenise_uint16_t(model, start, count, tile, values);
        case 32: return untokenise_uint32_t(model, start, count, tile, values);
        default: return untokenise_uint64_t(model, start, count, tile, values);
    }
}

}  // namespace shrinkpoint
