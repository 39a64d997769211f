// Levels of a normal distribution by look-up, 16 values at a time. Gives the bits of normal_float.hpp for groups of 64.
#pragma once
#include <algorithm>

#include "base/bits.hpp"
#include "wire/normal_float.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>

namespace shrinkpoint {

// Cells of a quarter each; the last one has no end. If no cell has two thresholds, a cell leaves two levels to choose
// from.
struct LevelCells {
    static constexpr unsigned kCells = 16, kCellsPerUnit = 4;
    alignas(64) float thresholds[kCells], low[kCells], high[kCells];
    alignas(64) int32_t codes[kCells];  // code of `low`; the code of `high` is the next
    float largest;                      // largest level
    int32_t levels;
    bool usable = true;

    explicit LevelCells(const NormalWire& layout) {
        levels = 1 << (layout.bits - 1), largest = layout.centers[levels - 1];
        usable = layout.centers[0] > 0 && largest <= kCells;  // so that no scale is 0, and no error nan
        if (!usable) return;
        std::fill_n(thresholds, kCells, kInfinity);
        int32_t counts[kCells] = {};
        for (int32_t k = 0; k + 1 < levels; ++k) {
            const float threshold = (layout.centers[k] + layout.centers[k + 1]) * 0.5f;
            const bool ascends = threshold > (k == 0 ? 0.0f : (layout.centers[k - 1] + layout.centers[k]) * 0.5f);
            const float place = threshold * kCellsPerUnit;
            const auto cell = static_cast<unsigned>(place < kCells - 1 ? place : kCells - 1);
            usable = usable && ascends && ++counts[cell] == 1;
            if (!usable) return;
            thresholds[cell] = threshold;
        }
        for (unsigned cell = 0, level = 0; cell < kCells; ++cell) {
            codes[cell] = static_cast<int32_t>(level), low[cell] = high[cell] = layout.centers[level];
            if (counts[cell] != 0) high[cell] = layout.centers[++level];
        }
    }
};

class LevelLookup {
   public:
    SHRINKPOINT_INLINE512 explicit LevelLookup(const LevelCells& cells)
        : thresholds_(_mm512_load_ps(cells.thresholds)), low_(_mm512_load_ps(cells.low)),
          high_(_mm512_load_ps(cells.high)), codes_(_mm512_load_si512(cells.codes)), largest_(cells.largest),
          sign_(_mm512_set1_epi32(cells.levels)) {}

    // Writes the codes of 64 values and returns the bits of their scale.
    SHRINKPOINT_INLINE512 uint16_t encode(const float* values, uint8_t* out) const {
        const __m512 factor = _mm512_set1_ps(static_cast<float>(kRootHalfPi / kUsualGroup));
        __m512 sizes[4], parts[4];
        for (int i = 0; i < 4; ++i) sizes[i] = _mm512_abs_ps(_mm512_loadu_ps(values + 16 * i));
        for (int i = 0; i < 4; ++i) parts[i] = _mm512_mul_ps(sizes[i], factor);
        const float mean = sum(parts), first = mean < kInfinity ? nearest_brief(mean) : kInfinity;
        if (!(first < kInfinity) || first < kLeastScale) {
            std::memset(out, 0, kUsualGroup);
            return first < kLeastScale ? 0 : kNanScale;
        }
        const float scale = best(sizes, mean, first);
        const __m512 inverse = _mm512_set1_ps(1 / scale);
        for (int i = 0; i < 4; ++i) {
            const __m512 scaled = _mm512_mul_ps(sizes[i], inverse);
            const __m512i cell = cell_of(sizes[i], inverse);
            __m512i code = _mm512_permutexvar_epi32(cell, codes_);
            code = _mm512_mask_add_epi32(code, above(scaled, cell), code, _mm512_set1_epi32(1));
            const __m512 value = _mm512_loadu_ps(values + 16 * i);
            code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_LT_OQ), code, sign_);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8(code));
        }
        return static_cast<uint16_t>(bits_of(scale) >> 16);
    }

   private:
    __m512 thresholds_, low_, high_;
    __m512i codes_;
    float largest_;
    __m512i sign_;

    // The cell of a magnitude. Multiplying by four is exact.
    SHRINKPOINT_INLINE512 static __m512i cell_of(__m512 size, __m512 inverse) {
        const __m512 place = _mm512_mul_ps(size, _mm512_mul_ps(inverse, _mm512_set1_ps(LevelCells::kCellsPerUnit)));
        return _mm512_cvttps_epi32(_mm512_min_ps(place, _mm512_set1_ps(LevelCells::kCells - 1)));
    }

    SHRINKPOINT_INLINE512 __mmask16 above(__m512 scaled, __m512i cell) const {
        return _mm512_cmp_ps_mask(scaled, _mm512_permutexvar_ps(cell, thresholds_), _CMP_GT_OQ);
    }

    // Sums 64 values by adding halves as halved() does, except the last four.
    SHRINKPOINT_INLINE512 static __m128 four_sums(const __m512* x) {
        const __m512 all = _mm512_add_ps(_mm512_add_ps(x[0], x[2]), _mm512_add_ps(x[1], x[3]));
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
        return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    }

    SHRINKPOINT_INLINE512 static float sum(const __m512* x) {
        const __m128 four = four_sums(x), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
    }

    SHRINKPOINT_INLINE512 __m128 errors(const __m512* sizes, __m512 inverse) const {
        __m512 squares[4];
        for (int i = 0; i < 4; ++i) {
            const __m512 scaled = _mm512_mul_ps(sizes[i], inverse);
            const __m512i cell = cell_of(sizes[i], inverse);
            const __m512 level =
                _mm512_mask_permutexvar_ps(_mm512_permutexvar_ps(cell, low_), above(scaled, cell), cell, high_);
            const __m512 off = _mm512_sub_ps(scaled, level);
            squares[i] = _mm512_mul_ps(off, off);
        }
        return four_sums(squares);
    }

    // Same as nearest_brief.
    SHRINKPOINT_INLINE512 static __m128 nearest_briefs(__m128 x) {
        const __m128i word = _mm_castps_si128(x), odd = _mm_and_si128(_mm_srli_epi32(word, 16), _mm_set1_epi32(1));
        const __m128i rounded = _mm_add_epi32(_mm_add_epi32(word, _mm_set1_epi32(0x7FFF)), odd);
        return _mm_castsi128_ps(_mm_and_si128(rounded, _mm_set1_epi32(static_cast<int>(0xFFFF0000u))));
    }

    // Same as Levels::best, with the four scales side by side.
    SHRINKPOINT_INLINE512 float best(const __m512* sizes, float mean, float first) const {
        const __m512 largest = _mm512_max_ps(_mm512_max_ps(sizes[0], sizes[1]), _mm512_max_ps(sizes[2], sizes[3]));
        const float most = _mm512_reduce_max_ps(largest) * (1 / largest_), spread = most - mean;
        const __m128 tried = _mm_setr_ps(first, mean + spread * 0.25f, mean + spread * 0.5f, most);
        const __m128 scales = nearest_briefs(tried), inverses = _mm_div_ps(_mm_set1_ps(1), scales);
        const __m512 repeated = _mm512_broadcast_f32x4(inverses);
        __m128 a = errors(sizes, _mm512_permute_ps(repeated, 0x00)), b = errors(sizes, _mm512_permute_ps(repeated, 0x55));
        __m128 c = errors(sizes, _mm512_permute_ps(repeated, 0xAA)), d = errors(sizes, _mm512_permute_ps(repeated, 0xFF));
        _MM_TRANSPOSE4_PS(a, b, c, d);
        const __m128 parts = _mm_mul_ps(scales, _mm_set1_ps(1 / first));
        const __m128 sums = _mm_mul_ps(_mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)), _mm_mul_ps(parts, parts));
        // The first of the least, without a branch: it would be wrong half of the time.
        const __m128 pairs = _mm_min_ps(sums, _mm_movehl_ps(sums, sums));
        const __m128 least = _mm_min_ps(pairs, _mm_shuffle_ps(pairs, pairs, 1));
        const int equal = _mm_movemask_ps(_mm_cmpeq_ps(sums, _mm_broadcastss_ps(least)));
        alignas(16) float scale_of[4];
        _mm_store_ps(scale_of, scales);
        return scale_of[__builtin_ctz(static_cast<unsigned>(equal) | 8)];
    }
};

}  // namespace shrinkpoint
#endif
