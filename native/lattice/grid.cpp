#include "lattice/grid.hpp"

#include <stdexcept>
#include <utility>

#include "base/bits.hpp"

namespace shrinkpoint {

namespace {

constexpr int32_t kMaxStep = 1 << 12;
constexpr int32_t kMaxScaleExponent = 120 * kStepsPerOctave;
constexpr float kMaxGain = 16.0f;
constexpr uint64_t kMaxIndices = uint64_t{1} << 56;  // so that bytes of them can be counted

std::vector<float> steps_of(const std::vector<int16_t>& exponents) {
    std::vector<float> out;
    out.reserve(exponents.size());
    for (const int16_t exponent : exponents) out.push_back(float_of(power(exponent)));
    return out;
}

std::vector<int16_t> classes_of(const std::vector<int16_t>& exponents) {
    constexpr int64_t kMost = (1 << 14) - 1;
    int64_t sum = 0;
    for (const int16_t exponent : exponents) sum += exponent;
    const auto count = static_cast<int64_t>(std::max<size_t>(1, exponents.size()));
    const int64_t mean = sum / count - (sum % count < 0);
    std::vector<int16_t> out;
    out.reserve(exponents.size());
    for (const int16_t exponent : exponents)
        out.push_back(static_cast<int16_t>(std::min(std::max(exponent - mean, -kMost), kMost)));
    return out;
}

// Calls make(row, column, place, run) for the parts of rows in [start, start + count).
template <typename Make>
SHRINKPOINT_INLINE void by_rows(const Lattice& lattice, uint64_t start, size_t count, Make make) {
    uint64_t row = start / lattice.columns, column = start % lattice.columns;
    for (size_t done = 0; done < count; ++row, column = 0) {
        const size_t run = static_cast<size_t>(std::min<uint64_t>(lattice.columns - column, count - done));
        make(row, column, done, run);
        done += run;
    }
}

// Sets each out to make(value of its row, value of its column); there may be one column value for all.
template <typename Row, typename Column, typename Out, typename Make>
SHRINKPOINT_INLINE void spread(const Lattice& lattice, const std::vector<Row>& rows, const std::vector<Column>& columns,
                               uint64_t start, size_t count, Out* out, Make make) {
    by_rows(lattice, start, count, [&](uint64_t row, uint64_t column, size_t place, size_t run) {
        const Row row_value = rows[row];
        const Column* column_values = columns.data();
        if (columns.size() == 1)
            std::fill_n(out + place, run, make(row_value, column_values[0]));
        else
            for (size_t i = 0; i < run; ++i) out[place + i] = make(row_value, column_values[column + i]);
    });
}

}  // namespace

Lattice::Lattice(bool is_powers, std::vector<int16_t> by_row, std::vector<int16_t> by_column, uint64_t height,
                 uint64_t width, int32_t power_step, uint32_t dither_seed)
    : powers(is_powers),
      rows(height),
      columns(width),
      step(power_step),
      seed(dither_seed),
      row_exponents(std::move(by_row)),
      column_exponents(std::move(by_column)) {
    if (row_exponents.size() != rows || (column_exponents.size() != 1 && column_exponents.size() != columns))
        throw std::invalid_argument("exponents: expected one for each row, and one for each column or for all");
    if (columns != 0 && rows > kMaxIndices / columns)
        throw std::invalid_argument("rows and columns: too many");
    if (step < 1 || step > kMaxStep) throw std::invalid_argument("step: expected 1 to 4096");
    if (columns == 1) {  // a column is worked through as a row: neither sums nor products mind
        std::swap(rows, columns);
        std::swap(row_exponents, column_exponents);
    }
    row_steps = steps_of(row_exponents), column_steps = steps_of(column_exponents);
    row_classes = classes_of(row_exponents), column_classes = classes_of(column_exponents);
}

Lattice Lattice::with_gain(Codes first, float gain) const {
    if (powers) throw std::invalid_argument("gain: of points that stand for powers");
    if (!(gain > 0.0f && gain <= kMaxGain)) throw std::invalid_argument("gain: out of range");
    Lattice out = *this;
    out.origin = first, out.excess_gain = gain - 1.0f;
    return out;
}

bool Lattice::has_normal_steps() const {
    int32_t low = 0, high = 0;
    for (const std::vector<int16_t>* side : {&row_exponents, &column_exponents}) {
        if (side->empty()) continue;
        const auto [least, most] = std::minmax_element(side->begin(), side->end());
        low += *least, high += *most;
    }
    return low >= -kMaxScaleExponent && high <= kMaxScaleExponent;
}

SHRINKPOINT_KERNEL(void, fill_steps, (const Lattice& lattice, uint64_t start, size_t count, float* out),
                   (lattice, start, count, out)) {
    spread(lattice, lattice.row_steps, lattice.column_steps, start, count, out,
           [](float row, float column) { return row * column; });
}

SHRINKPOINT_KERNEL(void, fill_step_classes, (const Lattice& lattice, uint64_t start, size_t count, uint8_t* out),
                   (lattice, start, count, out)) {
    static constexpr int16_t kFirst = 0, kLast = kStepClasses - 1, kMiddle = kStepClasses / 2;
    spread(lattice, lattice.row_classes, lattice.column_classes, start, count, out, [](int16_t row, int16_t column) {
        const auto sum = static_cast<int16_t>(row + column);
        const auto step_class = static_cast<int16_t>((sum >> 2) + kMiddle);
        return static_cast<uint8_t>(std::min(std::max(step_class, kFirst), kLast));
    });
}

namespace {

SHRINKPOINT_KERNEL(void, fill_int_exponents, (const Lattice& lattice, uint64_t start, size_t count, int32_t* out),
                   (lattice, start, count, out)) {
    spread(lattice, lattice.row_exponents, lattice.column_exponents, start, count, out,
           [](int32_t row, int32_t column) { return row + column; });
}

SHRINKPOINT_KERNEL(void, fill_short_exponents, (const Lattice& lattice, uint64_t start, size_t count, int16_t* out),
                   (lattice, start, count, out)) {
    spread(lattice, lattice.row_exponents, lattice.column_exponents, start, count, out,
           [](int16_t row, int16_t column) { return static_cast<int16_t>(row + column); });
}

}  // namespace

void fill_exponents(const Lattice& lattice, uint64_t start, size_t count, int32_t* out) {
    fill_int_exponents(lattice, start, count, out);
}

void fill_exponents(const Lattice& lattice, uint64_t start, size_t count, int16_t* out) {
    fill_short_exponents(lattice, start, count, out);
}

SHRINKPOINT_KERNEL(void, fill_dithers, (uint32_t seed, uint64_t start, size_t count, float* out),
                   (seed, start, count, out)) {
    uint32_t next = static_cast<uint32_t>(start) * 0x9E3779B1u + seed;
    for (size_t i = 0; i < count; ++i, next += 0x9E3779B1u) {
        uint32_t x = next;
        x = (x ^ x >> 16) * 0x7FEB352Du;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        x = (x ^ x >> 16) >> 24;
        out[i] = static_cast<float>(static_cast<int32_t>(x)) / 256 + (1.0f / 512 - 0.5f);  // exact: multiples of 1/512
    }
}

bool round_exponents(const int16_t* exponents, const int16_t* centers, size_t count, int32_t allowed, int16_t* out) {
    const int32_t unit = 2 * allowed + 1;
    bool same = true;
    for (size_t i = 0; i < count; ++i) {
        const int32_t center = centers == nullptr ? 0 : centers[i], moved = exponents[i] - center + allowed;
        const int32_t multiple = moved >= 0 ? moved / unit : -((unit - 1 - moved) / unit);
        out[i] = static_cast<int16_t>(center + multiple * unit);
        same = same && multiple == 0;
    }
    return same;
}

}  // namespace shrinkpoint
