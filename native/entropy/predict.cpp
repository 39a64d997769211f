#include "entropy/predict.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bits.hpp"
#include "base/simd.hpp"

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shrinkpoint {

#if defined(__SSE__) || defined(__x86_64__)
ScopedFpEnvironment::ScopedFpEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
ScopedFpEnvironment::~ScopedFpEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
ScopedFpEnvironment::ScopedFpEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
}
ScopedFpEnvironment::~ScopedFpEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }
#else
ScopedFpEnvironment::ScopedFpEnvironment() = default;
ScopedFpEnvironment::~ScopedFpEnvironment() = default;
#endif

namespace {

inline bool finite(float value) { return std::fabs(value) <= std::numeric_limits<float>::max(); }

}  // namespace

SHRINKPOINT_KERNEL(void, predict_adam,
                   (const Model& model, const float* base, const float* moment1, const float* moment2, size_t count,
                    uint32_t* predicted),
                   (model, base, moment1, moment2, count, predicted)) {
    const float decay = model.parameters[0], step = model.parameters[1];
    const float correction = model.parameters[2], eps = model.parameters[3];
    for (size_t i = 0; i < count; ++i) {
        const float denominator = std::sqrt(moment2[i]) / correction + eps;
        const float value = base[i] * decay + (step * moment1[i]) / denominator;
        predicted[i] = bits_of(finite(value) ? value : base[i]);
    }
}

SHRINKPOINT_KERNEL(void, predict_square,
                   (const Model& model, const float* base, const float* moment1, const float* moment1_base,
                    size_t count, uint32_t* predicted, uint32_t* squares),
                   (model, base, moment1, moment1_base, count, predicted, squares)) {
    const float beta2 = model.parameters[1];
    const float weight1 = model.parameters[2], weight2 = model.parameters[3];
    for (size_t i = 0; i < count; ++i) {
        const float gradient = moment1_base[i] + (moment1[i] - moment1_base[i]) / weight1;
        const float square = weight2 * gradient * gradient;
        const float value = base[i] * beta2 + square;
        predicted[i] = bits_of(finite(value) ? value : base[i]);
        squares[i] = finite(square) ? bits_of(square) & 0x7fffffffu : 0;
    }
}

namespace {

SHRINKPOINT_KERNEL(void, predict_row,
                   (int32_t center, const int8_t* column_factors, size_t count, int32_t* levels),
                   (center, column_factors, count, levels)) {
    for (size_t j = 0; j < count; ++j) {
        const int32_t level = (center + column_factors[j]) / kFactorSteps;
        levels[j] = column_factors[j] == kZeroRow ? kZeroLevel : level;
    }
}

}  // namespace

void predict_levels(const Factors& factors, uint64_t start, size_t count, int32_t* levels) {
    auto next = std::upper_bound(factors.segments.begin(), factors.segments.end(), start,
                                 [](uint64_t position, const Segment& s) { return position < s.start; });
    size_t index = static_cast<size_t>(next - factors.segments.begin()) - 1;
    size_t done = 0;
    while (done < count) {
        const Segment& segment = factors.segments[index];
        const uint64_t inside = start + done - segment.start;
        const uint64_t row = inside / segment.columns, column = inside % segment.columns;
        if (row >= segment.rows) {
            ++index;
            continue;
        }
        const size_t run = static_cast<size_t>(std::min<uint64_t>(segment.columns - column, count - done));
        const int8_t row_factor = factors.rows[segment.row_offset + row];
        const int8_t* column_factors = factors.columns.data() + segment.column_offset + column;
        const int32_t center = factors.centers[index] + row_factor;
        if (row_factor == kZeroRow)
            std::fill_n(levels + done, run, kZeroLevel);
        else
            predict_row(center, column_factors, run, levels + done);
        done += run;
    }
}

namespace {

constexpr uint64_t kPiece = 1 << 16;  // rows or columns whose levels, below 2^14 each, add up within 32 bits

struct LevelSums {
    explicit LevelSums(const Segment& segment)
        : row_sums(segment.rows),
          row_counts(segment.rows),
          column_sums(segment.columns),
          column_counts(segment.columns) {}
    std::vector<int64_t> row_sums, row_counts, column_sums, column_counts;
};

// Adds the levels of one row to the sums of its columns. Returns their sum and the number that are not zero.
template <typename U>
SHRINKPOINT_INLINE uint64_t add_row_of(const U* __restrict values, uint64_t columns, unsigned drop,
                                       uint32_t* __restrict column_sums, uint32_t* __restrict column_counts) {
    constexpr U magnitude = static_cast<U>(~U{0}) >> 1;
    uint32_t sum = 0, present = 0;
    for (uint64_t c = 0; c < columns; ++c) {
        const uint32_t bits = values[c] & magnitude;
        const uint32_t level = bits >> drop, is_nonzero = bits != 0;
        sum += level;
        present += is_nonzero;
        column_sums[c] += level;
        column_counts[c] += is_nonzero;
    }
    return uint64_t{sum} << 32 | present;
}

SHRINKPOINT_KERNEL(uint64_t, add_row_16,
                   (const uint16_t* values, uint64_t columns, unsigned drop, uint32_t* column_sums,
                    uint32_t* column_counts),
                   (values, columns, drop, column_sums, column_counts)) {
    return add_row_of(values, columns, drop, column_sums, column_counts);
}

SHRINKPOINT_KERNEL(uint64_t, add_row_32,
                   (const uint32_t* values, uint64_t columns, unsigned drop, uint32_t* column_sums,
                    uint32_t* column_counts),
                   (values, columns, drop, column_sums, column_counts)) {
    return add_row_of(values, columns, drop, column_sums, column_counts);
}

uint64_t add_row(const uint16_t* values, uint64_t columns, unsigned drop, uint32_t* sums, uint32_t* counts) {
    return add_row_16(values, columns, drop, sums, counts);
}

uint64_t add_row(const uint32_t* values, uint64_t columns, unsigned drop, uint32_t* sums, uint32_t* counts) {
    return add_row_32(values, columns, drop, sums, counts);
}

// Sums a block of at most kPiece rows and kPiece columns in 32 bits.
template <typename U>
void add_block(const U* values, const Segment& segment, uint64_t row, uint64_t column, unsigned drop, LevelSums& sums) {
    const uint64_t rows = std::min(kPiece, segment.rows - row), columns = std::min(kPiece, segment.columns - column);
    std::vector<uint32_t> column_sums(columns), column_counts(columns);
    for (uint64_t r = row; r < row + rows; ++r) {
        const uint64_t both = add_row(values + segment.start + r * segment.columns + column, columns, drop,
                                      column_sums.data(), column_counts.data());
        sums.row_sums[r] += static_cast<int64_t>(both >> 32);
        sums.row_counts[r] += static_cast<int64_t>(both & 0xffffffffu);
    }
    for (uint64_t c = 0; c < columns; ++c) {
        sums.column_sums[column + c] += column_sums[c];
        sums.column_counts[column + c] += column_counts[c];
    }
}

int8_t factor(int64_t sum, int64_t count, int64_t center) {
    if (count == 0) return kZeroRow;
    const int64_t mean = (2 * sum + count) / (2 * count);
    return static_cast<int8_t>(std::clamp<int64_t>(mean - center, -127, 127));
}

template <typename U>
void fit_segment(const U* values, unsigned drop, size_t index, Factors& factors) {
    const Segment& segment = factors.segments[index];
    LevelSums sums(segment);
    for (uint64_t row = 0; row < segment.rows; row += kPiece)
        for (uint64_t column = 0; column < segment.columns; column += kPiece)
            add_block(values, segment, row, column, drop, sums);
    int64_t total = 0, present = 0;
    for (uint64_t r = 0; r < segment.rows; ++r) total += sums.row_sums[r], present += sums.row_counts[r];
    const int64_t mean = present > 0 ? (2 * total + present) / (2 * present) : 0;
    const int64_t center = std::min<int64_t>(mean, kMaxCenter);
    factors.centers[index] = static_cast<int32_t>(center);
    for (uint64_t r = 0; r < segment.rows; ++r)
        factors.rows[segment.row_offset + r] = factor(sums.row_sums[r], sums.row_counts[r], center);
    for (uint64_t c = 0; c < segment.columns; ++c)
        factors.columns[segment.column_offset + c] =
            segment.rows == 1 ? int8_t{0} : factor(sums.column_sums[c], sums.column_counts[c], center);
}

}  // namespace

void fit_factors(const uint8_t* values, unsigned width, unsigned mantissa, unsigned fine, Factors& factors) {
    const unsigned drop = mantissa - fine - 1;  // a level has kFactorSteps = 2 steps
    for (size_t i = 0; i < factors.segments.size(); ++i) {
        if (width == 16)
            fit_segment(reinterpret_cast<const uint16_t*>(values), drop, i, factors);
        else
            fit_segment(reinterpret_cast<const uint32_t*>(values), drop, i, factors);
    }
}

}  // namespace shrinkpoint
