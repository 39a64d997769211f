// Tokens::Delta: the symbol is the sign and size class of the difference to a predicted value. Included by tokens.cpp
// only.
#pragma once
#include <algorithm>

#include "base/bits.hpp"
#include "entropy/int_types.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

constexpr unsigned kDirect = 8;  // differences below this are symbols of their own

// Maps bit patterns to integers in the order of their values; -0 stays apart from 0.
template <typename U>
struct Order {
    explicit Order(const Model& model)
        : shift(model.shift),
          mask(static_cast<Extra<U>>(static_cast<U>(~U{0}) >> model.shift)),
          sign(model.mantissa == 0 ? 0 : mask ^ mask >> 1) {}

    // Masks instead of conditions: a loop without control flow becomes vector instructions.
    Extra<U> ordered(U u) const {
        const Extra<U> x = static_cast<Extra<U>>(static_cast<Extra<U>>(u) >> shift);
        return x ^ (sign | (negative(x) & mask));
    }
    U unordered(Extra<U> x) const {
        x &= mask;
        const Extra<U> positive = sign != 0 ? mask : 0;
        return static_cast<U>((x ^ positive ^ (negative(x) & (positive ^ sign))) << shift);
    }
    // All ones where the sign bit is set.
    Extra<U> negative(Extra<U> x) const { return Extra<U>{0} - ((x & sign) >> (width_of<U> - 1 - shift)); }

    unsigned shift;
    Extra<U> mask, sign;
};

// 2 floor(log2(n)) + the second leading bit, for n >= 2. For n = 2, 3, 4, 6, 8: 2, 3, 4, 5, 6.
SHRINKPOINT_INLINE uint32_t half_octaves(uint64_t n) {
    const auto log = 63 - static_cast<uint32_t>(__builtin_clzll(n | 1));
    return 2 * log + static_cast<uint32_t>(n >> (log - 1) & 1);
}
// The same for n < 2^31, through a float: before AVX-512 vectors of integers have no leading-zero count. The low bits
// of large numbers are cleared first so that nothing is rounded.
SHRINKPOINT_INLINE uint32_t half_octaves(uint32_t n) {
    const uint32_t exact = n & ~((0u - static_cast<uint32_t>(n >= 1u << 24)) & 0xff);
    return (bits_of(static_cast<float>(static_cast<int32_t>(exact))) >> 22) - 2 * 127;
}

template <typename U>
SHRINKPOINT_INLINE void delta_predict(const Model& model, const Arrays& arrays, uint64_t start, size_t count,
                                      Tile& tile) {
    tile.prediction = tile.predicted;
    if (model.predictor == Predictor::None)
        std::memset(tile.predicted, 0, count * sizeof(U));
    else if (model.predictor == Predictor::Base)
        tile.prediction = arrays.base + start * sizeof(U);
}

template <typename U>
SHRINKPOINT_INLINE void delta_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count,
                                       Tile& tile) {
    const U* predicted = static_cast<const U*>(tile.prediction);
    if (model.mantissa == 0) {
        std::fill_n(tile.contexts, count, uint16_t{0});
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        const auto exponent = static_cast<int32_t>((predicted[i] & magnitude_mask<U>) >> model.mantissa);
        tile.contexts[i] = static_cast<uint16_t>(clamp_int(model.top - exponent, 0, 15) << 5);
    }
    if (arrays.hint != nullptr) {
        for (size_t i = 0; i < count; ++i)
            tile.contexts[i] = static_cast<uint16_t>(tile.contexts[i] | (arrays.hint[start + i] & 31));
        return;
    }
    if (!arrays.moments()) return;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t m = bits_of(arrays.moment1[start + i]), v = bits_of(arrays.moment2[start + i]);
        tile.contexts[i] = static_cast<uint16_t>(tile.contexts[i] | adam_ratio_class(m, v) << 1 | static_cast<int32_t>(m >> 31));
    }
}

SHRINKPOINT_INLINE void square_contexts(size_t count, Tile& tile) {
    const auto* predicted = reinterpret_cast<const uint32_t*>(tile.predicted);
    for (size_t i = 0; i < count; ++i) {
        const int32_t share = static_cast<int32_t>((predicted[i] & 0x7fffffffu) >> 23) -
                              static_cast<int32_t>(tile.squares[i] >> 23);
        tile.contexts[i] = static_cast<uint16_t>(clamp_int(share, 0, 31));
    }
}

// Notes that a tile has no extra bits, if all its differences are small.
SHRINKPOINT_INLINE void note_widths(size_t count, Tile& tile) {
    uint8_t any = 0;
    for (size_t i = 0; i < count; ++i) any = static_cast<uint8_t>(any | tile.extra_bits[i]);
    tile.uniform = any == 0 ? 0 : kMixedWidths;
}

template <typename U>
SHRINKPOINT_INLINE void delta_tokens(const Model& model, const uint8_t* all, uint64_t start, size_t count, Tile& tile) {
    using Word = Extra<U>;
    const U* __restrict values = reinterpret_cast<const U*>(all) + start;
    const U* __restrict predicted = static_cast<const U*>(tile.prediction);
    Word* __restrict extra = reinterpret_cast<Word*>(tile.extra);
    uint8_t* __restrict symbols = tile.symbols;
    uint8_t* __restrict extra_bits = tile.extra_bits;
    const Order<U> order(model);
    const unsigned unused = 8 * sizeof(Word) - (width_of<U> - model.shift);
    for (size_t i = 0; i < count; ++i) {
        // Wraps around at the width, so that any value can follow any prediction.
        const Word difference = order.ordered(values[i]) - order.ordered(predicted[i]);
        const auto d = static_cast<std::make_signed_t<Word>>(difference << unused) >> unused;
        const Word negative = static_cast<Word>(d) >> (8 * sizeof(Word) - 1);
        const Word n = static_cast<Word>(d) ^ (Word{0} - negative);
        // 64-bit words need the guard. For narrower words a small n gives a number that is not used.
        const uint32_t octaves = half_octaves(sizeof(Word) == 8 ? static_cast<Word>(n | 2) : n);
        const uint32_t large = 0u - static_cast<uint32_t>(n >= kDirect);
        const uint32_t width = ((octaves >> 1) - 1) & large;
        const uint32_t token = (static_cast<uint32_t>(n) & ~large) | ((octaves + (kDirect - 6)) & large);
        symbols[i] = static_cast<uint8_t>(2 * token + static_cast<uint32_t>(negative));
        extra_bits[i] = static_cast<uint8_t>(width);
        extra[i] = n & ((Word{1} << width) - 1);
    }
    note_widths(count, tile);
}

SHRINKPOINT_INLINE void delta_widths(size_t count, Tile& tile) {
    const uint8_t* __restrict symbols = tile.symbols;
    uint8_t* __restrict extra_bits = tile.extra_bits;
    for (size_t i = 0; i < count; ++i) {
        const uint8_t width = static_cast<uint8_t>((symbols[i] >> 2) - kDirect / 2 + 2);
        extra_bits[i] = symbols[i] < 2 * kDirect ? 0 : width;
    }
    note_widths(count, tile);
}

template <typename U>
SHRINKPOINT_INLINE void delta_values(const Model& model, uint64_t start, size_t count, const Tile& tile, uint8_t* all) {
    using Word = Extra<U>;
    U* __restrict values = reinterpret_cast<U*>(all) + start;
    const U* __restrict predicted = static_cast<const U*>(tile.prediction);
    const Word* __restrict extra = reinterpret_cast<const Word*>(tile.extra);
    const uint8_t* __restrict symbols = tile.symbols;
    const uint8_t* __restrict extra_bits = tile.extra_bits;
    const Order<U> order(model);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t symbol = symbols[i], token = symbol >> 1;
        const Word negative = Word{0} - static_cast<Word>(symbol & 1);
        const Word lead = 2 | (token & 1);  // kDirect is even, so the token's last bit is the second leading bit
        const unsigned width = extra_bits[i] & (8 * sizeof(Word) - 1);
        const Word large = Word{0} - static_cast<Word>(token >= kDirect);
        const Word n = (token & ~large) | ((lead << width | extra[i]) & large);
        values[i] = order.unordered(order.ordered(predicted[i]) + (n ^ negative));
    }
}

}  // namespace shrinkpoint
