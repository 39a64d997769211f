// Groups of values on the levels of comm/compressors/quantizers.py, each with a scale. For kernels.
#pragma once
#include <cmath>
#include <limits>

#include "base/bits.hpp"
#include "wire/blocks.hpp"
#include "wire/reductions.hpp"

namespace shrinkpoint {

constexpr double kRootHalfPi = 1.2533141373155001;  // sqrt(pi / 2)
constexpr float kLeastScale = 0x1p-120f;
constexpr uint16_t kNanScale = 0x7FC0;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kUsualGroup = 64;  // loops of known length are faster

template <unsigned levels>
struct Levels {
    float centers[levels], thresholds[levels];  // the last threshold is not one

    SHRINKPOINT_INLINE explicit Levels(const float* from) {
        for (unsigned i = 0; i < levels; ++i) centers[i] = from[i];
        for (unsigned i = 0; i + 1 < levels; ++i) thresholds[i] = (centers[i] + centers[i + 1]) * 0.5f;
    }

    // The sum of squared errors of magnitudes, in units of `scale`. `scratch` has room for as many.
    SHRINKPOINT_INLINE float error(const float* sizes, size_t count, float scale, float* __restrict buffer) const {
        const float inverse = 1 / scale;
        for (size_t i = 0; i < count; ++i) {
            const float scaled = sizes[i] * inverse;
            float level = centers[0];
#pragma GCC unroll 8
            for (unsigned k = 0; k + 1 < levels; ++k) level = scaled > thresholds[k] ? centers[k + 1] : level;
            buffer[i] = (scaled - level) * (scaled - level);
        }
        return halved(buffer, count);
    }

    SHRINKPOINT_INLINE void codes(const float* values, size_t count, float scale, uint8_t* __restrict out) const {
        const float inverse = 1 / scale;
        for (size_t i = 0; i < count; ++i) {
            const float scaled = std::fabs(values[i]) * inverse;
            int32_t code = values[i] < 0 ? static_cast<int32_t>(levels) : 0;
#pragma GCC unroll 8
            for (unsigned k = 0; k + 1 < levels; ++k) code += scaled > thresholds[k] ? 1 : 0;
            out[i] = static_cast<uint8_t>(code);
        }
    }

    // The best of four scales. `first`, the scale of the mean magnitude, is neither zero nor infinite.
    SHRINKPOINT_INLINE float best(const float* sizes, size_t count, float mean, float first, float* buffer) const {
        if (levels == 1) return first;
        const float most = float_of(largest(sizes, count)) * (1 / centers[levels - 1]);
        const float unit = 1 / first, ratio = first * unit, spread = most - mean;
        const float others[] = {mean + spread * 0.25f, mean + spread * 0.5f, most};
        float best = first, least = error(sizes, count, first, buffer) * (ratio * ratio);
        for (const float other : others) {
            const float scale = nearest_brief(other), part = scale * unit;
            const float sum = error(sizes, count, scale, buffer) * (part * part);
            best = sum < least ? scale : best;
            least = sum < least ? sum : least;
        }
        return best;
    }

    // Writes the codes of a group of `count` values, of which `real` are not padding, and returns the bits of its
    // scale.
    SHRINKPOINT_INLINE uint16_t encode(const float* values, size_t count, size_t real, uint8_t* out) const {
        float sizes[kMaxGroup], buffer[kMaxGroup];
        const auto factor = static_cast<float>(kRootHalfPi / static_cast<double>(real));
        for (size_t i = 0; i < count; ++i) buffer[i] = (sizes[i] = std::fabs(values[i])) * factor;
        const float mean = halved(buffer, count);
        const float first = mean < kInfinity ? nearest_brief(mean) : kInfinity;
        if (!(first < kInfinity) || first < kLeastScale) {
            std::memset(out, 0, count);
            return first < kLeastScale ? 0 : kNanScale;
        }
        const float scale = best(sizes, count, mean, first, buffer);
        codes(values, count, scale, out);
        return static_cast<uint16_t>(bits_of(scale) >> 16);
    }

    SHRINKPOINT_INLINE void decode(const uint8_t* codes, size_t count, float scale, float* __restrict out) const {
        for (size_t i = 0; i < count; ++i) {
            const uint32_t code = codes[i];
            out[i] = float_of(chosen<levels>(code, 0) | (code & levels) * (0x80000000u / levels)) * scale;
        }
    }

    // The bits of the center for the low bits of a code, out of `many` from the first on, without a look-up.
    template <unsigned many>
    SHRINKPOINT_INLINE uint32_t chosen(uint32_t code, unsigned first) const {
        if constexpr (many == 1) {
            return bits_of(centers[first]);
        } else {
            const uint32_t low = chosen<many / 2>(code, first), high = chosen<many / 2>(code, first + many / 2);
            const uint32_t which = 0 - (code / (many / 2) & 1);
            return low ^ (which & (low ^ high));
        }
    }

    SHRINKPOINT_INLINE void encode_span(const NormalWire& layout, const float* values, size_t first, size_t count,
                                        uint8_t* codes, uint8_t* scales) const {
        for (size_t start = 0; start < count; start += layout.group) {
            const size_t real = std::min(layout.group, layout.count - first - start);
            const uint16_t scale = layout.group == kUsualGroup
                                       ? encode(values + start, kUsualGroup, real, codes + start)
                                       : encode(values + start, layout.group, real, codes + start);
            *scales++ = static_cast<uint8_t>(scale);
            *scales++ = static_cast<uint8_t>(scale >> 8);
        }
    }

    SHRINKPOINT_INLINE void decode_span(const NormalWire& layout, const uint8_t* scales, size_t count,
                                        const uint8_t* codes, float* values) const {
        for (size_t start = 0; start < count; start += layout.group) {
            const uint8_t* scale = scales + 2 * (start / layout.group);
            const uint32_t word = static_cast<uint32_t>(scale[0]) << 16 | static_cast<uint32_t>(scale[1]) << 24;
            decode(codes + start, std::min(layout.group, count - start), float_of(word), values + start);
        }
    }
};

}  // namespace shrinkpoint
