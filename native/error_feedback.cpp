#include "error_feedback.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "lattice_cells.hpp"
#include "parallel.hpp"
#include "predict.hpp"
#include "simd.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kRows = 32;    // that are worked through side by side
constexpr size_t kColumns = 4;  // whose sums are computed together, so that each error is loaded once for all of them

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

// sums[c * kRows + r] = the sum over j < count of factors[c * width + j] * errors[j * kRows + r], in the order of j:
// every element by itself, so that it does not matter how many of them are in a register.
template <size_t kBytes>
ALWAYS_INLINE void sum_in_registers(const float* errors, const float* factors, size_t width, size_t count,
                                    float* sums) {
    using Lanes = typename Register<kBytes>::Lanes;
    static_assert(sizeof(Lanes) == kBytes);
    constexpr size_t kParts = kRows * sizeof(float) / kBytes, kPair = kBytes == 64 ? kColumns : kColumns / 2;
    for (size_t first = 0; first < kColumns; first += kPair) {  // as many columns at once as there are registers for
        Lanes totals[kPair][kParts] = {};
        for (size_t j = 0; j < count; ++j)
            for (size_t part = 0; part < kParts; ++part) {
                Lanes lanes;
                std::memcpy(&lanes, errors + j * kRows + part * (kBytes / sizeof(float)), kBytes);
                for (size_t c = 0; c < kPair; ++c) totals[c][part] += lanes * factors[(first + c) * width + j];
            }
        std::memcpy(sums + first * kRows, totals, sizeof totals);
    }
}

void sum_errors_plain(const float* errors, const float* factors, size_t width, size_t count, float* sums) {
    sum_in_registers<16>(errors, factors, width, count, sums);
}

#if defined(SHRINKPOINT_X86)
SHRINKPOINT_AVX2 void sum_errors_avx2(const float* errors, const float* factors, size_t width, size_t count,
                                      float* sums) {
    sum_in_registers<32>(errors, factors, width, count, sums);
}

SHRINKPOINT_AVX512 void sum_errors_avx512(const float* errors, const float* factors, size_t width, size_t count,
                                          float* sums) {
    sum_in_registers<64>(errors, factors, width, count, sums);
}
#endif

void sum_errors_before(const float* errors, const float* factors, size_t width, size_t count, float* sums) {
#if defined(SHRINKPOINT_X86)
    if (simd() == Simd::Avx512) return sum_errors_avx512(errors, factors, width, count, sums);
    if (simd() == Simd::Avx2) return sum_errors_avx2(errors, factors, width, count, sums);
#endif
    sum_errors_plain(errors, factors, width, count, sums);
}

struct Column {
    const float *values, *dithers, *row_steps;
    float step;  // of the column
};

// The codes of a column, given what is fed back to it, and its errors.
SHRINKPOINT_KERNEL(bool, round_column, (const Column& column, const float* feedback, int16_t* codes, float* errors),
                   (column, feedback, codes, errors)) {
    uint32_t out_of_range = 0;
    for (size_t r = 0; r < kRows; ++r) {
        const float step = column.row_steps[r] * column.step, quotient = (column.values[r] + feedback[r]) / step;
        const float position = (step > 0.0f ? quotient : 0.0f) - column.dithers[r];
        out_of_range |= !(std::fabs(position) < static_cast<float>(kMaxCode));
        codes[r] = static_cast<int16_t>(rounded(reachable(position)));
        errors[r] = column.values[r] - (static_cast<float>(codes[r]) + column.dithers[r]) * step;
    }
    return out_of_range == 0;
}

// Adds what the error of one column feeds back to another.
SHRINKPOINT_KERNEL(void, add_feedback, (const float* errors, float factor, float* sums), (errors, factor, sums)) {
    for (size_t r = 0; r < kRows; ++r) sums[r] += errors[r] * factor;
}

// Some rows of a matrix, column by column.
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
        for (size_t start = 0; start < width_; start += kColumns) {
            const size_t group = std::min(kColumns, width_ - start);
            float sums[kColumns * kRows] = {};
            if (group == kColumns)
                sum_errors_before(errors_.data(), factor_ + start * width_, width_, start, sums);
            else
                for (size_t c = 0; c < group; ++c) add_columns(0, start, start + c, sums + c * kRows);
            for (size_t c = 0; c < group; ++c) {
                add_columns(start, start + c, start + c, sums + c * kRows);
                fits &= round(start + c, sums + c * kRows);
            }
        }
        for (size_t r = 0; r < count; ++r)
            for (size_t k = 0; k < width_; ++k) codes[(first + r) * width_ + k] = codes_[k * kRows + r];
        return fits;
    }

   private:
    void load(Floats values, uint64_t first, size_t count) {
        std::fill_n(row_steps_, kRows, 1.0f);
        if (count < kRows) std::fill(values_.begin(), values_.end(), 0.0f);
        for (size_t r = 0; r < count; ++r) {
            row_steps_[r] = lattice_.row_steps[first + r];
            const float* row = read_floats(values, (first + r) * width_, width_, row_.data());
            for (size_t k = 0; k < width_; ++k) values_[k * kRows + r] = row[k];
            if (lattice_.seed == 0) continue;
            fill_dithers(lattice_.seed, (first + r) * width_, width_, row_.data());
            for (size_t k = 0; k < width_; ++k) dithers_[k * kRows + r] = row_[k];
        }
    }

    void add_columns(size_t begin, size_t end, size_t k, float* sums) const {
        for (size_t j = begin; j < end; ++j) add_feedback(errors_.data() + j * kRows, factor_[k * width_ + j], sums);
    }

    bool round(size_t k, const float* feedback) {
        const std::vector<float>& steps = lattice_.column_steps;
        const Column column{values_.data() + k * kRows, dithers_.data() + (lattice_.seed == 0 ? 0 : k * kRows),
                            row_steps_, steps[steps.size() == 1 ? 0 : k]};
        return round_column(column, feedback, codes_.data() + k * kRows, errors_.data() + k * kRows);
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
