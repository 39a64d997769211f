#include "tokens.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "bitstream.hpp"
#include "predict.hpp"
#include "simd.hpp"

#define ALWAYS_INLINE [[gnu::always_inline]] inline

namespace shrinkpoint {

namespace {

constexpr unsigned kResidualContexts = 48;  // companion's level less the predicted one, half levels of the range
constexpr unsigned kCompanionZero = kResidualContexts, kDeadContext = kResidualContexts + 1;
constexpr unsigned kLevelContexts = kResidualContexts + 2;
constexpr int kZeroSymbol = 0, kEscapeSymbol = 255;

constexpr unsigned kDirect = 8;  // differences below this are symbols of their own

template <typename U>
constexpr unsigned width_of = 8 * sizeof(U);

// The type in which a value's extra bits are handled: 32 bits where they suffice, for twice the lanes.
template <typename U>
using Extra = std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t>;

template <typename U>
constexpr U magnitude_mask = static_cast<U>(static_cast<U>(~U{0}) >> 1);

inline int32_t clamp_int(int32_t x, int32_t low, int32_t high) { return x < low ? low : (x > high ? high : x); }

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// ---- Level ------------------------------------------------------------------------------------------------------

template <typename U>
ALWAYS_INLINE void level_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile) {
    if (arrays.factors != nullptr && !arrays.factors->empty())
        predict_levels(*arrays.factors, start, count, tile.levels);
    else
        std::fill_n(tile.levels, count, model.bias);
    const unsigned drop = model.mantissa - model.fine;
    if (model.companion == Companion::Base) {
        const U* base = reinterpret_cast<const U*>(arrays.base) + start;
        for (size_t i = 0; i < count; ++i) {
            const U magnitude = base[i] & magnitude_mask<U>;
            const int32_t residual = static_cast<int32_t>(magnitude >> drop) - tile.levels[i] + 24;
            tile.contexts[i] = static_cast<uint16_t>(
                magnitude == 0 ? kCompanionZero : static_cast<unsigned>(clamp_int(residual, 0, kResidualContexts - 1)));
        }
    } else if (model.companion == Companion::Moment1) {
        const float* moment = arrays.moment1 + start;
        const int32_t half = 127 << model.fine;
        for (size_t i = 0; i < count; ++i) {
            const uint32_t magnitude = float_bits(moment[i]) & 0x7fffffffu;
            const int32_t level = 2 * (static_cast<int32_t>(magnitude >> (23 - model.fine)) - half) + half;
            const int32_t residual = (level - tile.levels[i]) / 2 + 24;
            tile.contexts[i] = static_cast<uint16_t>(
                magnitude == 0 ? kCompanionZero : static_cast<unsigned>(clamp_int(residual, 0, kResidualContexts - 1)));
        }
    } else {
        std::fill_n(tile.contexts, count, uint16_t{0});
    }
    for (size_t i = 0; i < count; ++i) {
        const bool dead = tile.levels[i] == kDeadLevel;
        tile.contexts[i] = dead ? uint16_t{kDeadContext} : tile.contexts[i];
        tile.levels[i] = dead ? model.bias : tile.levels[i];
    }
}

template <typename U>
ALWAYS_INLINE void level_tokens(const Model& model, const uint8_t* all, uint64_t start, size_t count, Tile& tile) {
    const U* __restrict values = reinterpret_cast<const U*>(all) + start;
    Extra<U>* __restrict extra = reinterpret_cast<Extra<U>*>(tile.extra);
    uint8_t* __restrict symbols = tile.symbols;
    uint8_t* __restrict extra_bits = tile.extra_bits;
    const int32_t* __restrict levels = tile.levels;
    const unsigned drop = model.mantissa - model.fine, shift = model.shift, low = drop - shift;
    const auto low_mask = static_cast<Extra<U>>((uint64_t{1} << low) - 1);
    const unsigned has_sign = model.has_sign;
    const auto normal_bits = static_cast<uint8_t>(low + has_sign);
    for (size_t i = 0; i < count; ++i) {
        const auto u = static_cast<Extra<U>>(values[i]);
        const Extra<U> magnitude = u & magnitude_mask<U>;
        const Extra<U> sign = (u >> (width_of<U> - 1)) & has_sign;
        const int32_t distance = static_cast<int32_t>(magnitude >> drop) - levels[i] + 128;
        const bool zero = magnitude == 0, escape = static_cast<uint32_t>(distance - 1) > 253;
        const Extra<U> normal = sign << low | ((magnitude >> shift) & low_mask);
        symbols[i] = static_cast<uint8_t>(zero ? kZeroSymbol : escape ? kEscapeSymbol : distance);
        extra[i] = zero ? sign : escape ? u : normal;
        extra_bits[i] = static_cast<uint8_t>(zero ? has_sign : escape ? width_of<U> : normal_bits);
    }
}

ALWAYS_INLINE void level_widths(const Model& model, size_t count, Tile& tile) {
    const auto normal = static_cast<uint8_t>(model.mantissa - model.fine - model.shift + model.has_sign);
    const uint8_t zero = model.has_sign, escape = static_cast<uint8_t>(model.width);
    for (size_t i = 0; i < count; ++i) {
        const uint8_t symbol = tile.symbols[i];
        tile.extra_bits[i] = symbol == kZeroSymbol ? zero : symbol == kEscapeSymbol ? escape : normal;
    }
}

template <typename U>
ALWAYS_INLINE void level_values(const Model& model, uint64_t start, size_t count, const Tile& tile, uint8_t* all) {
    U* __restrict values = reinterpret_cast<U*>(all) + start;
    const Extra<U>* __restrict extra = reinterpret_cast<const Extra<U>*>(tile.extra);
    const uint8_t* __restrict symbols = tile.symbols;
    const int32_t* __restrict levels = tile.levels;
    const unsigned drop = model.mantissa - model.fine, shift = model.shift, low = drop - shift;
    const auto low_mask = static_cast<Extra<U>>((uint64_t{1} << low) - 1);
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

// ---- Delta ------------------------------------------------------------------------------------------------------

// How bit patterns map to integers in the order of the values they stand for; -0 stays apart from 0.
template <typename U>
struct Order {
    explicit Order(const Model& model)
        : shift(model.shift),
          mask(static_cast<Extra<U>>(static_cast<U>(~U{0}) >> model.shift)),
          sign(model.mantissa == 0 ? 0 : mask ^ mask >> 1) {}

    Extra<U> ordered(U u) const {
        const Extra<U> x = static_cast<Extra<U>>(u) >> shift;
        const Extra<U> negative = (x & sign) != 0 ? mask : sign;
        return x ^ negative;
    }
    U unordered(Extra<U> x) const {
        x &= mask;
        const Extra<U> negative = (x & sign) != 0 ? sign : (sign != 0 ? mask : 0);
        return static_cast<U>((x ^ negative) << shift);
    }

    unsigned shift;
    Extra<U> mask, sign;
};

// floor(log2(n)) for 4 <= n.
ALWAYS_INLINE uint32_t floor_log(uint64_t n) { return 63 - static_cast<uint32_t>(__builtin_clzll(n)); }
ALWAYS_INLINE uint32_t floor_log(uint32_t n) {
    // Through a float, because vectors of integers have no leading-zero count before AVX-512. Clearing the second
    // leading bit keeps the rounding from reaching the next power of two. n < 2^31.
    const auto rounded = static_cast<float>(static_cast<int32_t>(n & ~(n >> 1)));
    return (float_bits(rounded) >> 23) - 127;
}

template <typename U>
ALWAYS_INLINE void delta_predict(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile) {
    U* predicted = reinterpret_cast<U*>(tile.predicted);
    if (model.predictor == Predictor::None)
        std::memset(predicted, 0, count * sizeof(U));
    else if (model.predictor == Predictor::Base)
        std::memcpy(predicted, arrays.base + start * sizeof(U), count * sizeof(U));
}

template <typename U>
ALWAYS_INLINE void delta_contexts(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile) {
    const U* predicted = reinterpret_cast<const U*>(tile.predicted);
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
    if (arrays.moment1 == nullptr || arrays.moment2 == nullptr) return;
    for (size_t i = 0; i < count; ++i) {
        // log2(|m| / sqrt(v)) in half octaves, from the bit patterns alone: the same on every machine.
        const uint32_t m = float_bits(arrays.moment1[start + i]), v = float_bits(arrays.moment2[start + i]);
        const int32_t ratio = static_cast<int32_t>((m & 0x7fffffffu) >> 22) -
                              static_cast<int32_t>(((v & 0x7fffffffu) >> 23) + 127);
        const int32_t clamped = clamp_int(ratio + 10, 0, 15);
        tile.contexts[i] = static_cast<uint16_t>(tile.contexts[i] | clamped << 1 | static_cast<int32_t>(m >> 31));
    }
}

ALWAYS_INLINE void square_contexts(size_t count, Tile& tile) {
    const auto* predicted = reinterpret_cast<const uint32_t*>(tile.predicted);
    for (size_t i = 0; i < count; ++i) {
        const int32_t share = static_cast<int32_t>((predicted[i] & 0x7fffffffu) >> 23) -
                              static_cast<int32_t>(tile.squares[i] >> 23);
        tile.contexts[i] = static_cast<uint16_t>(clamp_int(share, 0, 31));
    }
}

template <typename U>
ALWAYS_INLINE void delta_tokens(const Model& model, const uint8_t* all, uint64_t start, size_t count, Tile& tile) {
    using Word = Extra<U>;
    const U* __restrict values = reinterpret_cast<const U*>(all) + start;
    const U* __restrict predicted = reinterpret_cast<const U*>(tile.predicted);
    Word* __restrict extra = reinterpret_cast<Word*>(tile.extra);
    uint8_t* __restrict symbols = tile.symbols;
    uint8_t* __restrict extra_bits = tile.extra_bits;
    const Order<U> order(model);
    const unsigned unused = 8 * sizeof(Word) - (width_of<U> - model.shift);
    for (size_t i = 0; i < count; ++i) {
        // Wrapped to the width, so that any value can follow any prediction.
        const Word difference = order.ordered(values[i]) - order.ordered(predicted[i]);
        const auto d = static_cast<std::make_signed_t<Word>>(difference << unused) >> unused;
        const Word negative = static_cast<Word>(d) >> (8 * sizeof(Word) - 1);
        const Word n = static_cast<Word>(d) ^ (Word{0} - negative);
        const uint32_t log = floor_log(static_cast<Word>(n | 4)), width = log - 1;
        const bool direct = n < kDirect;
        const uint32_t token = kDirect + 2 * (log - 3) + static_cast<uint32_t>((n >> width) & 1);
        symbols[i] = static_cast<uint8_t>(2 * (direct ? static_cast<uint32_t>(n) : token) + negative);
        extra_bits[i] = static_cast<uint8_t>(direct ? 0 : width);
        extra[i] = direct ? 0 : n & ((Word{1} << width) - 1);
    }
}

ALWAYS_INLINE void delta_widths(size_t count, Tile& tile) {
    for (size_t i = 0; i < count; ++i) {
        const unsigned token = tile.symbols[i] >> 1;
        tile.extra_bits[i] = static_cast<uint8_t>(token < kDirect ? 0 : ((token - kDirect) >> 1) + 2);
    }
}

template <typename U>
ALWAYS_INLINE void delta_values(const Model& model, uint64_t start, size_t count, const Tile& tile, uint8_t* all) {
    using Word = Extra<U>;
    U* __restrict values = reinterpret_cast<U*>(all) + start;
    const U* __restrict predicted = reinterpret_cast<const U*>(tile.predicted);
    const Word* __restrict extra = reinterpret_cast<const Word*>(tile.extra);
    const uint8_t* __restrict symbols = tile.symbols;
    const uint8_t* __restrict extra_bits = tile.extra_bits;
    const Order<U> order(model);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t symbol = symbols[i], token = symbol >> 1;
        const Word negative = Word{0} - static_cast<Word>(symbol & 1);
        const Word lead = 2 | (token & 1);  // kDirect is even, so the token's last bit is the second leading bit
        const unsigned width = extra_bits[i] & (8 * sizeof(Word) - 1);
        const Word n = token < kDirect ? token : lead << width | extra[i];
        values[i] = order.unordered(order.ordered(predicted[i]) + (n ^ negative));
    }
}

// ---- extra bits -------------------------------------------------------------------------------------------------

ALWAYS_INLINE bool uniform_widths(const uint8_t* widths, size_t count) {
    unsigned different = 0;
    for (size_t i = 0; i < count; ++i) different |= widths[i] ^ widths[0];
    return different == 0;
}

// Fields of one width: eight of them end where they began within a byte, so their places are loop constants.
template <typename Word>
ALWAYS_INLINE void load_uniform(const uint8_t* data, uint64_t position, unsigned width, size_t count, Word* extra) {
    const Word mask = static_cast<Word>((uint64_t{1} << width) - 1);
    const uint8_t* at = data + (position >> 3);
    unsigned offset[8], shift[8];
    for (unsigned j = 0; j < 8; ++j) {
        const unsigned bit = static_cast<unsigned>(position & 7) + j * width;
        offset[j] = bit >> 3, shift[j] = bit & 7;
    }
    size_t i = 0;
    for (; i + 8 <= count; i += 8, at += width) {
        for (unsigned j = 0; j < 8; ++j) {
            uint64_t word;
            std::memcpy(&word, at + offset[j], 8);
            extra[i + j] = static_cast<Word>(word >> shift[j]) & mask;
        }
    }
    for (; i < count; ++i) extra[i] = static_cast<Word>(load_bits(data, position + i * width, width));
}

template <typename U>
ALWAYS_INLINE void load_extra(const uint8_t* data, uint64_t position, size_t count, Tile& tile) {
    auto* __restrict extra = reinterpret_cast<Extra<U>*>(tile.extra);
    const uint8_t* __restrict widths = tile.extra_bits;
    if (uniform_widths(widths, count) && widths[0] <= 56)
        return load_uniform(data, position, widths[0], count, extra);
    for (size_t i = 0; i < count; ++i) {
        const unsigned width = widths[i];
        extra[i] = static_cast<Extra<U>>(sizeof(U) == 8 ? load_bits_wide(data, position, width)
                                                        : load_bits(data, position, width));
        position += width;
    }
}

ALWAYS_INLINE void store_narrow(const Tile& tile, size_t count, BitWriter& writer) {
    const auto* extra = reinterpret_cast<const uint32_t*>(tile.extra);
    const uint8_t* widths = tile.extra_bits;
    if (uniform_widths(widths, count) && widths[0] <= 28) return writer.put_uniform(extra, count, widths[0]);
    BitWriter bits = writer;  // a copy whose address nobody has stays in registers
    size_t i = 0;
    // Two fields at once where both fit: the writer's state is a chain of dependent steps.
    for (; i + 2 <= count; i += 2) {
        const unsigned first = widths[i], both = first + widths[i + 1];
        if (both <= 56) {
            bits.put(extra[i] | static_cast<uint64_t>(extra[i + 1]) << first, both);
        } else {
            bits.put(extra[i], first);
            bits.put(extra[i + 1], both - first);
        }
    }
    if (i < count) bits.put(extra[i], widths[i]);
    writer = bits;
}

// ---- one instantiation a width, each compiled for several instruction sets ---------------------------------------

template <typename U>
ALWAYS_INLINE void contextualise_as(const Model& model, const Arrays& arrays, uint64_t start, size_t count,
                                    Tile& tile) {
    if (model.tokens == Tokens::Level) return level_contexts<U>(model, arrays, start, count, tile);
    delta_predict<U>(model, arrays, start, count, tile);
    if (model.predictor == Predictor::Square) return square_contexts(count, tile);
    delta_contexts<U>(model, arrays, start, count, tile);
}

template <typename U>
ALWAYS_INLINE void tokenise_as(const Model& model, const uint8_t* values, uint64_t start, size_t count, Tile& tile) {
    if (model.tokens == Tokens::Level) return level_tokens<U>(model, values, start, count, tile);
    delta_tokens<U>(model, values, start, count, tile);
}

template <typename U>
ALWAYS_INLINE void untokenise_as(const Model& model, const uint8_t* extra, uint64_t position, uint64_t start,
                                 size_t count, Tile& tile, uint8_t* values) {
    load_extra<U>(extra, position, count, tile);
    if (model.tokens == Tokens::Level) return level_values<U>(model, start, count, tile, values);
    delta_values<U>(model, start, count, tile, values);
}

#define SHRINKPOINT_FOR_WIDTH(U)                                                                                    \
    SHRINKPOINT_CLONES void contextualise_##U(const Model& model, const Arrays& arrays, uint64_t start,             \
                                              size_t count, Tile& tile) {                                           \
        contextualise_as<U>(model, arrays, start, count, tile);                                                     \
    }                                                                                                               \
    SHRINKPOINT_CLONES void tokenise_##U(const Model& model, const uint8_t* values, uint64_t start, size_t count,   \
                                         Tile& tile) {                                                              \
        tokenise_as<U>(model, values, start, count, tile);                                                          \
    }                                                                                                               \
    SHRINKPOINT_CLONES void untokenise_##U(const Model& model, const uint8_t* extra, uint64_t position,             \
                                           uint64_t start, size_t count, Tile& tile, uint8_t* values) {             \
        untokenise_as<U>(model, extra, position, start, count, tile, values);                                       \
    }

SHRINKPOINT_FOR_WIDTH(uint8_t)
SHRINKPOINT_FOR_WIDTH(uint16_t)
SHRINKPOINT_FOR_WIDTH(uint32_t)
SHRINKPOINT_FOR_WIDTH(uint64_t)
#undef SHRINKPOINT_FOR_WIDTH

SHRINKPOINT_CLONES uint64_t sum_widths(const uint8_t* widths, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; ++i) sum += widths[i];
    return sum;
}

SHRINKPOINT_CLONES void fill_widths(const Model& model, size_t count, Tile& tile) {
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

unsigned context_count(const Model& model) {
    switch (model.tokens) {
        case Tokens::Level: return kLevelContexts;
        case Tokens::Delta: return model.mantissa == 0 ? 1 : kMaxContexts;
        case Tokens::Planes: return model.width / 8;
    }
    return 1;
}

void contextualise(const Model& model, const Arrays& arrays, uint64_t start, size_t count, Tile& tile) {
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
    switch (model.width) {
        case 8: return tokenise_uint8_t(model, values, start, count, tile);
        case 16: return tokenise_uint16_t(model, values, start, count, tile);
        case 32: return tokenise_uint32_t(model, values, start, count, tile);
        default: return tokenise_uint64_t(model, values, start, count, tile);
    }
}

void write_extra(const Model& model, const Tile& tile, size_t count, BitWriter& bits) {
    if (model.width < 64) return store_narrow(tile, count, bits);
    for (size_t i = 0; i < count; ++i) bits.put_wide(tile.extra[i], tile.extra_bits[i]);
}

uint64_t extra_sum(const Tile& tile, size_t count) { return sum_widths(tile.extra_bits, count); }

uint64_t extra_widths(const Model& model, size_t count, Tile& tile) {
    fill_widths(model, count, tile);
    return extra_sum(tile, count);
}

void untokenise(const Model& model, const uint8_t* extra, uint64_t position, uint64_t start, size_t count, Tile& tile,
                uint8_t* values) {
    switch (model.width) {
        case 8: return untokenise_uint8_t(model, extra, position, start, count, tile, values);
        case 16: return untokenise_uint16_t(model, extra, position, start, count, tile, values);
        case 32: return untokenise_uint32_t(model, extra, position, start, count, tile, values);
        default: return untokenise_uint64_t(model, extra, position, start, count, tile, values);
    }
}

}  // namespace shrinkpoint
