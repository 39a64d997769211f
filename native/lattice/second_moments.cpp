#include "lattice/second_moments.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "base/bits.hpp"
#include "base/lanes.hpp"
#include "base/parallel.hpp"
#include "base/simd.hpp"
#include "entropy/predict.hpp"
#include "entropy/tiles.hpp"
#include "lattice/cells.hpp"
#include "lattice/grid.hpp"
#include "lattice/powers.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kBlockRows = 256, kBlockColumns = 1024;  // sums of logarithms of a block fit into 32 bits
constexpr size_t kLanes = 8;
constexpr int32_t kLogBits = 12;
constexpr int32_t kSmallest = (127 - 120) << 23;  // the bits of 2^-120
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kMinCode = -126, kMaxPowerCode = 127, kMaxPowerStep = 64;

// log2 of a normal float in units of 2^-12, with an error of at most 2 units. The mantissa 1 + f gives f plus f (1 - f)
// times a polynomial, which is log2(1 + f) to within 1.2e-4.
SHRINKPOINT_INLINE int32_t log2_units(int32_t bits) {
    const int32_t f = bits >> 8 & 0x7fff, g = (f * (0x8000 - f)) >> 15;
    const int32_t slope = 14376 + (((-7833 + ((2691 * f) >> 15)) * f) >> 15);
    const int32_t log = (((bits >> 23) - 127) * 0x8000) + f + ((g * slope) >> 15);
    return (log + (1 << (14 - kLogBits))) >> (15 - kLogBits);
}

struct RowSums {
    int32_t log = 0, count = 0;
    double sum = 0;
};

struct ColumnSums {
    int32_t logs[kBlockColumns], counts[kBlockColumns];
    double sums[kBlockColumns];
};

SHRINKPOINT_INLINE double sum_of(const float* values, size_t count) {
    double lanes[kLanes] = {};
    by_lanes<kLanes>(count, [&](size_t i, size_t lane) { lanes[lane] += values[i]; });
    return sum_lanes(lanes);
}

// Adds up to kBlockColumns values of a row. Returns 1 if a value is not finite and 2 if one is below zero.
template <bool kByColumn>
SHRINKPOINT_INLINE int32_t add_values_of_row(const float* seconds, const float* firsts, size_t count,
                                             ColumnSums& columns, RowSums& row) {
    int32_t log_sum = 0, present_count = 0, infinite = 0, negative = 0;
    for (size_t i = 0; i < count; ++i) {
        const auto bits = static_cast<int32_t>(bits_of(seconds[i]));
        const auto first = static_cast<int32_t>(bits_of(firsts[i]) & 0x7fffffff);
        const int32_t present = (bits > 0) | (first != 0);
        infinite |= ((bits & 0x7fffffff) >= kInfinity) | (first >= kInfinity);
        negative |= (bits < 0) & ((bits & 0x7fffffff) != 0);
        const int32_t log = log2_units(std::max(bits, kSmallest)) & -present;
        if (kByColumn) columns.logs[i] += log, columns.counts[i] += present;
        log_sum += log;
        present_count += present;
    }
    for (size_t i = 0; kByColumn && i < count; ++i) columns.sums[i] += seconds[i];
    row = {log_sum, present_count, sum_of(seconds, count)};
    return infinite | negative << 1;
}

SHRINKPOINT_KERNEL(int32_t, add_row,
                   (const float* seconds, const float* firsts, size_t count, ColumnSums& columns, RowSums& row),
                   (seconds, firsts, count, columns, row)) {
    return add_values_of_row<true>(seconds, firsts, count, columns, row);
}

SHRINKPOINT_KERNEL(int32_t, add_row_without_columns,
                   (const float* seconds, const float* firsts, size_t count, ColumnSums& columns, RowSums& row),
                   (seconds, firsts, count, columns, row)) {
    return add_values_of_row<false>(seconds, firsts, count, columns, row);
}

// The exponents of code 0 in a part of a row, and codes of one byte and of two.
struct CodedRow {
    const int32_t* exponents;
    int8_t* codes;
    int16_t* wide_codes;
};

// The exponents of a part of a row of an earlier checkpoint, and its codes; codes are null if there is none.
struct EarlierRow {
    const int32_t* exponents;
    const int8_t* codes;
    int32_t step;
};

template <bool kEarlier>
SHRINKPOINT_INLINE void quantize_row_of(const float* seconds, const float* firsts, size_t count, int32_t step,
                                        const EarlierRow& earlier, const PowerZones& zones, const CodedRow& out) {
    const float scale = 1.0f / static_cast<float>(step << kLogBits), per_step = 1.0f / static_cast<float>(step);
    // Copies: through the structures a code of a byte might overwrite them, and nothing would become vectors.
    const auto [exponents, codes, wide_codes] = out;
    const auto [earlier_exponents, earlier_codes, earlier_step] = earlier;
    const auto [dead, above, below] = zones;
    for (size_t i = 0; i < count; ++i) {
        const auto bits = static_cast<int32_t>(bits_of(seconds[i]));
        const bool present = (bits > 0) | ((bits_of(firsts[i]) & 0x7fffffff) != 0);
        const int32_t exponent = exponents[i];
        const int32_t distance = log2_units(std::max(bits, kSmallest)) * kStepsPerOctave - exponent * (1 << kLogBits);
        const float position = static_cast<float>(distance) * scale;
        int32_t code = rounded(std::min(std::max(position, -200.0f), 200.0f)) &
                       -static_cast<int32_t>(std::fabs(position) >= dead);
        if (kEarlier) {
            const int32_t earlier_code = earlier_codes[i];
            const int32_t moved = earlier_exponents[i] + earlier_step * earlier_code - exponent;
            const int32_t nearest = rounded(static_cast<float>(moved) * per_step);
            const float beyond = position - static_cast<float>(nearest);
            const bool stays = (earlier_code != kZeroCode) & (beyond < above) & (beyond > -below);
            code = chosen(stays, nearest, code);
        }
        code = chosen(present, std::min(std::max(code, kMinCode), kMaxPowerCode), kZeroCode);
        codes[i] = static_cast<int8_t>(code), wide_codes[i] = static_cast<int16_t>(code);
    }
}

SHRINKPOINT_KERNEL(void, quantize_row,
                   (const float* seconds, const float* firsts, size_t count, int32_t step, const PowerZones& zones,
                    const CodedRow& out),
                   (seconds, firsts, count, step, zones, out)) {
    quantize_row_of<false>(seconds, firsts, count, step, {}, zones, out);
}

SHRINKPOINT_KERNEL(void, quantize_row_after,
                   (const float* seconds, const float* firsts, size_t count, int32_t step, const EarlierRow& earlier,
                    const PowerZones& zones, const CodedRow& out),
                   (seconds, firsts, count, step, earlier, zones, out)) {
    quantize_row_of<true>(seconds, firsts, count, step, earlier, zones, out);
}

SHRINKPOINT_KERNEL(double, sum_relative_squares, (const float* firsts, const float* decoded, size_t count),
                   (firsts, decoded, count)) {
    double lanes[kLanes] = {};
    const auto square = [&](size_t i) {
        const float relative = firsts[i] * firsts[i] / decoded[i];
        return relative <= std::numeric_limits<float>::max() ? relative : 0.0f;
    };
    by_lanes<kLanes>(count, [&](size_t i, size_t lane) { lanes[lane] += square(i); });
    return sum_lanes(lanes);
}

struct Buffers {
    float seconds[kBlockColumns], firsts[kBlockColumns], decoded[kBlockColumns];
    int32_t exponents[kBlockColumns], earlier_exponents[kBlockColumns];
    int16_t codes[kBlockColumns];
    ColumnSums columns;
};

// A block of a matrix: rows [first_row, end_row) and `count` columns from `column` on.
struct Block {
    size_t index;    // index of its rows
    size_t segment;  // index of its columns
    uint64_t first_row, end_row, column;
    size_t count;
};

// Calls work(block, buffers) for all blocks of a matrix.
template <typename Work>
void by_blocks(uint64_t rows, uint64_t columns, unsigned threads, Work work) {
    const size_t segments = chunk_count(columns, kBlockColumns);
    parallel(chunk_count(rows, kBlockRows) * segments, threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        const auto buffers = std::make_unique<Buffers>();
        for (size_t index; indices.take(index);) {
            const Span block_rows = span_of(index / segments, rows, kBlockRows, kBlockRows);
            const Span block_columns = span_of(index % segments, columns, kBlockColumns, kBlockColumns);
            work(Block{index / segments, index % segments, block_rows.start, block_rows.start + block_rows.count,
                       block_columns.start, block_columns.count},
                 *buffers);
        }
    });
}

// Without first moments the second moments take their place: they say nothing more about what is present.
Floats firsts_or(Floats firsts, Floats seconds) { return firsts.data == nullptr ? seconds : firsts; }

}  // namespace

SecondMomentSums second_moment_sums(Floats seconds, Floats firsts, uint64_t rows, uint64_t columns, bool by_column,
                                    unsigned threads) {
    const Floats others = firsts_or(firsts, seconds);
    const size_t segments = chunk_count(columns, kBlockColumns), blocks = chunk_count(rows, kBlockRows);
    const uint64_t partial_count = by_column ? blocks * columns : 0;
    std::vector<RowSums> row_parts(rows * segments);
    std::vector<int32_t> log_parts(partial_count), count_parts(partial_count);
    std::vector<double> sum_parts(partial_count);
    std::atomic<int32_t> flags{0};
    const auto add = by_column ? add_row : add_row_without_columns;
    by_blocks(rows, columns, threads, [&](const Block& block, Buffers& buffers) {
        int32_t block_flags = 0;
        if (by_column) buffers.columns = {};
        for (uint64_t row = block.first_row; row < block.end_row; ++row) {
            const uint64_t start = row * columns + block.column;
            const float* values = read_floats(seconds, start, block.count, buffers.seconds);
            const float* first_values = read_floats(others, start, block.count, buffers.firsts);
            RowSums& sums = row_parts[row * segments + block.segment];
            block_flags |= add(values, first_values, block.count, buffers.columns, sums);
        }
        flags |= block_flags;
        if (!by_column) return;
        const uint64_t place = block.index * columns + block.column;
        std::copy_n(buffers.columns.logs, block.count, log_parts.begin() + static_cast<ptrdiff_t>(place));
        std::copy_n(buffers.columns.counts, block.count, count_parts.begin() + static_cast<ptrdiff_t>(place));
        std::copy_n(buffers.columns.sums, block.count, sum_parts.begin() + static_cast<ptrdiff_t>(place));
    });
    SecondMomentSums out;
    out.finite = (flags & 1) == 0, out.negative = (flags & 2) != 0;
    out.row_logs.resize(rows), out.row_counts.resize(rows), out.row_sums.resize(rows);
    for (uint64_t row = 0; row < rows; ++row)
        for (size_t segment = 0; segment < segments; ++segment) {
            const RowSums& part = row_parts[row * segments + segment];
            out.row_logs[row] += part.log, out.row_counts[row] += part.count, out.row_sums[row] += part.sum;
        }
    if (!by_column) return out;
    out.column_logs.resize(columns), out.column_counts.resize(columns), out.column_sums.resize(columns);
    for (uint64_t place = 0, column = 0; place < partial_count;
         ++place, column = column + 1 == columns ? 0 : column + 1) {
        out.column_logs[column] += log_parts[place], out.column_counts[column] += count_parts[place];
        out.column_sums[column] += sum_parts[place];
    }
    return out;
}

std::vector<double> quantize_second_moments(const Lattice& lattice, uint64_t rows, Floats seconds, Floats firsts,
                                            const EarlierPowers& earlier, const PowerZones& zones, int8_t* codes,
                                            unsigned threads) {
    if (!lattice.powers || lattice.step < 1 || lattice.step > kMaxPowerStep)
        throw std::invalid_argument("lattice: expected powers that are 1 to 64 eighths of an octave apart");
    const bool follows = earlier.codes != nullptr;
    if (follows && (!earlier.lattice->powers || earlier.lattice->count() != lattice.count()))
        throw std::invalid_argument("earlier lattice: expected powers, as many as the lattice has");
    const uint64_t columns = rows == 0 ? 0 : lattice.count() / rows;
    const Floats others = firsts_or(firsts, seconds);
    const size_t segments = chunk_count(columns, kBlockColumns);
    std::vector<double> parts(firsts.data == nullptr ? 0 : rows * segments);
    by_blocks(rows, columns, threads, [&](const Block& block, Buffers& buffers) {
        for (uint64_t row = block.first_row; row < block.end_row; ++row) {
            const uint64_t start = row * columns + block.column;
            const float* values = read_floats(seconds, start, block.count, buffers.seconds);
            const float* first_values = read_floats(others, start, block.count, buffers.firsts);
            fill_exponents(lattice, start, block.count, buffers.exponents);
            const CodedRow out{buffers.exponents, codes + start, buffers.codes};
            if (follows) {
                fill_exponents(*earlier.lattice, start, block.count, buffers.earlier_exponents);
                const EarlierRow before{buffers.earlier_exponents, earlier.codes + start, earlier.lattice->step};
                quantize_row_after(values, first_values, block.count, lattice.step, before, zones, out);
            } else {
                quantize_row(values, first_values, block.count, lattice.step, zones, out);
            }
            if (parts.empty()) continue;
            make_powers(buffers.codes, buffers.exponents, lattice.step, block.count, buffers.decoded);
            parts[row * segments + block.segment] = sum_relative_squares(first_values, buffers.decoded, block.count);
        }
    });
    if (parts.empty()) return parts;
    std::vector<double> out(rows);
    for (uint64_t row = 0; row < rows; ++row)
        for (size_t segment = 0; segment < segments; ++segment) out[row] += parts[row * segments + segment];
    return out;
}

void second_exponents(const LogSums& row_sums, const LogSums& column_sums, int32_t limit, int16_t* rows,
                      size_t row_count, int16_t* columns, size_t column_count) {
    const double unit = kStepsPerOctave / static_cast<double>(1 << kLogBits), quarter = limit / 4;
    double total = 0, present = 0;
    for (size_t i = 0; i < row_sums.size; ++i) total += row_sums.logs[i], present += row_sums.counts[i];
    const double mean = total / std::max(1.0, present);
    const auto mean_of = [mean](const LogSums& sums, size_t i) {
        return sums.counts[i] > 0 ? sums.logs[i] / sums.counts[i] : mean;
    };
    const auto rounded = [unit](double value, double low, double high) {
        return static_cast<int16_t>(std::clamp(std::nearbyint(value * unit), low, high));
    };
    for (size_t i = 0; i < row_count; ++i) {
        const double value = row_count == 1 ? static_cast<float>(mean) : mean_of(row_sums, i);
        rows[i] = rounded(value, quarter - 2.0 * limit, limit);
    }
    for (size_t i = 0; i < column_count; ++i)
        columns[i] = column_count == 1 ? int16_t{0} : rounded(mean_of(column_sums, i) - mean, -quarter, quarter);
}

}  // namespace shrinkpoint
