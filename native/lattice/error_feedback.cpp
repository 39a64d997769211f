#include "lattice/error_feedback.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "base/parallel.hpp"
#include "base/simd.hpp"
#include "entropy/predict.hpp"
#include "lattice/cells.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kRows = 32;    // rows worked through side by side
constexpr size_t kColumns = 4;  // columns summed together, so that each error is loaded once

template <size_t kBytes>
struct Register;  // compilers pass over a vector_size that depends on a parameter
template <>
struct Register<16> {
    using Lanes = float __attribute__((vector_size(16)));
};
template <>
struct Register<32> {
    using Lanes = float __attribute__((vector_size(32)));
};
template <>
struct Register<64> {
    using Lanes = float __attribute__((vector_size(64)));
};

// Adds to sums[c * kRows + r] the sum over j < count of factors[c * width + j] * errors[j * kRows + r], in the order of
// j. Every element is summed by itself, so the number of elements in a register does not matter.
template <size_t kBytes>
SHRINKPOINT_INLINE void add_in_registers(const float* errors, const float* factors, size_t width, size_t count,
                                         float* sums) {
    using Lanes = typename Register<kBytes>::Lanes;
    static_assert(sizeof(Lanes) == kBytes);
    constexpr size_t kLanes = kBytes / sizeof(float);
    for (size_t r = 0; r < kRows; r += 2 * kLanes) {  // two of `kColumns` each are what registers hold
        Lanes low[kColumns], high[kColumns], errors_low, errors_high;
        for (size_t c = 0; c < kColumns; ++c) {
            std::memcpy(&low[c], sums + c * kRows + r, kBytes);
            std::memcpy(&high[c], sums + c * kRows + r + kLanes, kBytes);
        }
        for (size_t j = 0; j < count; ++j) {
            std::memcpy(&errors_low, errors + j * kRows + r, kBytes);
            std::memcpy(&errors_high, errors + j * kRows + r + kLanes, kBytes);
            for (size_t c = 0; c < kColumns; ++c) {
                const float factor = factors[c * width + j];
                low[c] += errors_low * factor;
                high[c] += errors_high * factor;
            }
        }
        for (size_t c = 0; c < kColumns; ++c) {
            std::memcpy(sums + c * kRows + r, &low[c], kBytes);
            std::memcpy(sums + c * kRows + r + kLanes, &high[c], kBytes);
        }
    }
}

void add_errors_plain(const float* errors, const float* factors, size_t width, size_t count, float* sums) {
    add_in_registers<16>(errors, factors, width, count, sums);
}

#if defined(SHRINKPOINT_X86)
SHRINKPOINT_AVX2 void add_errors_avx2(const float* errors, const float* factors, size_t width, size_t count,
                                      float* sums) {
    add_in_registers<32>(errors, factors, width, count, sums);
}

SHRINKPOINT_AVX512 void add_errors_avx512(const float* errors, const float* factors, size_t width, size_t count,
                                          float* sums) {
    add_in_registers<64>(errors, factors, width, count, sums);
}
#endif

// Does this for `kColumns` columns at once.
void add_errors(const float* errors, const float* factors, size_t width, size_t count, float* sums) {
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx512) return add_errors_avx512(errors, factors, width, count, sums);
    if (simd() == Simd::Avx2) return add_errors_avx2(errors, factors, width, count, sums);
#endif
    add_errors_plain(errors, factors, width, count, sums);
}

struct Column {
    const float *values, *dithers, *row_steps;
    float step, diagonal;  // step of the column, and its diagonal element of the factor
};

// Computes the codes of a column from the errors fed back to it, and its own errors.
SHRINKPOINT_KERNEL(bool, round_column, (const Column& column, const float* sums, int16_t* codes, float* errors),
                   (column, sums, codes, errors)) {
    const float scale = 1.0f / column.diagonal;
    uint32_t out_of_range = 0;
    for (size_t r = 0; r < kRows; ++r) {
        const float step = column.row_steps[r] * column.step, quotient = (column.values[r] + sums[r] * scale) / step;
        const float position = (step > 0.0f ? quotient : 0.0f) - column.dithers[r];
        out_of_range |= !(std::fabs(position) < static_cast<float>(kMaxCode));
        codes[r] = static_cast<int16_t>(rounded(reachable(position)));
        errors[r] = column.values[r] - (static_cast<float>(codes[r]) + column.dithers[r]) * step;
    }
    return out_of_range == 0;
}

// Adds the feedback of one column's error to another column.
SHRINKPOINT_KERNEL(void, add_feedback, (const float* errors, float factor, float* sums), (errors, factor, sums)) {
    for (size_t r = 0; r < kRows; ++r) sums[r] += errors[r] * factor;
}

// Some rows of a matrix, column by column. Position i is column `width - 1 - i`, since the factor has its columns in
// reverse order. So the last position comes first, and each gets the errors of the positions after it.
class Panel {
   public:
    Panel(const Lattice& lattice, const float* factor)
        : lattice_(lattice),
          factor_(factor),
          width_(lattice.columns),
          values_(width_ * kRows),
          errors_(width_ * kRows),
          dithers_(lattice.seed == 0 ? kRows : width_ * kRows),
          row_(width_),
          codes_(width_ * kRows) {}

    bool quantize(Floats values, uint64_t first, size_t count, int16_t* codes) {
        load(values, first, count);
        bool fits = true;
        for (size_t end = width_; end > 0; end -= std::min(kColumns, end)) fits &= quantize_group(end);
        for (size_t r = 0; r < count; ++r)
            for (size_t k = 0; k < width_; ++k) codes[(first + r) * width_ + k] = codes_[(width_ - 1 - k) * kRows + r];
        return fits;
    }

   private:
    void load(Floats values, uint64_t first, size_t count) {
        std::fill_n(row_steps_, kRows, 1.0f);
        if (count < kRows) std::fill(values_.begin(), values_.end(), 0.0f);
        for (size_t r = 0; r < count; ++r) {
            row_steps_[r] = lattice_.row_steps[first + r];
            const float* row = read_floats(values, (first + r) * width_, width_, row_.data());
            for (size_t k = 0; k < width_; ++k) values_[(width_ - 1 - k) * kRows + r] = row[k];
            if (lattice_.seed == 0) continue;
            fill_dithers(lattice_.seed, (first + r) * width_, width_, row_.data());
            for (size_t k = 0; k < width_; ++k) dithers_[(width_ - 1 - k) * kRows + r] = row_[k];
        }
    }

    // Positions of a group that ends here.
    bool quantize_group(size_t end) {
        const size_t begin = end - std::min(kColumns, end);
        float sums[kColumns * kRows] = {};
        if (end - begin == kColumns)
            add_errors(errors_.data() + end * kRows, factor_ + begin * width_ + end, width_, width_ - end, sums);
        else
            for (size_t i = begin; i < end; ++i) add_one(end, width_, i, sums + (i - begin) * kRows);
        bool fits = true;
        for (size_t i = end; i-- > begin;) {
            add_one(i + 1, end, i, sums + (i - begin) * kRows);
            fits &= round(i, sums + (i - begin) * kRows);
        }
        return fits;
    }

    void add_one(size_t from, size_t to, size_t i, float* sums) const {
        for (size_t j = from; j < to; ++j) add_feedback(errors_.data() + j * kRows, factor_[i * width_ + j], sums);
    }

    bool round(size_t i, const float* sums) {
        const std::vector<float>& steps = lattice_.column_steps;
        const Column column{values_.data() + i * kRows, dithers_.data() + (lattice_.seed == 0 ? 0 : i * kRows),
                            row_steps_, steps[steps.size() == 1 ? 0 : width_ - 1 - i], factor_[i * width_ + i]};
        return round_column(column, sums, codes_.data() + i * kRows, errors_.data() + i * kRows);
    }

    const Lattice& lattice_;
    const float* const factor_;
    const size_t width_;
    std::vector<float> values_, errors_, dithers_, row_;
    std::vector<int16_t> codes_;
    float row_steps_[kRows];
};

}  // namespace

bool quantize_with_feedback(const Lattice& lattice, Floats values, const float* factor, int16_t* codes,
                            unsigned threads) {
    if (lattice.powers) throw std::invalid_argument("feedback: points that stand for powers");
    std::atomic<bool> fits{true};
    if (lattice.columns == 0) return true;
    parallel(chunk_count(lattice.rows, kRows), threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        Panel panel(lattice, factor);
        for (size_t index; indices.take(index);) {
            const Span rows = span_of(index, lattice.rows, kRows, kRows);
            if (!panel.quantize(values, rows.start, rows.count, codes)) fits = false;
        }
    });
    return fits;
}

}  // namespace shrinkpoint
