#include "lattice/cells.hpp"

#include <algorithm>

#include "lattice/powers.hpp"

namespace shrinkpoint {

namespace {

SHRINKPOINT_KERNEL(void, multiply, (const float* roots, size_t count, float* out), (roots, count, out)) {
    for (size_t i = 0; i < count; ++i) out[i] *= roots[i];
}

SHRINKPOINT_KERNEL(void, make_multiples,
                   (const int16_t* codes, const float* steps, const float* dithers, size_t count, float* values),
                   (codes, steps, dithers, count, values)) {
    for (size_t i = 0; i < count; ++i) values[i] = (static_cast<float>(codes[i]) + dithers[i]) * steps[i];
}

SHRINKPOINT_KERNEL(void, make_gained_multiples,
                   (const int16_t* codes, const int16_t* origins, float excess_gain, const float* steps,
                    const float* dithers, size_t count, float* values),
                   (codes, origins, excess_gain, steps, dithers, count, values)) {
    for (size_t i = 0; i < count; ++i) {
        const auto moved = static_cast<float>(codes[i] - origins[i]);
        values[i] = ((static_cast<float>(codes[i]) + dithers[i]) + excess_gain * moved) * steps[i];
    }
}

}  // namespace

SHRINKPOINT_KERNEL(void, widen_codes, (const int8_t* codes, size_t count, int16_t* out), (codes, count, out)) {
    for (size_t i = 0; i < count; ++i) out[i] = codes[i];
}

SHRINKPOINT_KERNEL(bool, narrow_codes, (const int16_t* codes, size_t count, int8_t* out), (codes, count, out)) {
    int32_t lost = 0;
    for (size_t i = 0; i < count; ++i) {
        out[i] = static_cast<int8_t>(codes[i]);
        lost |= out[i] ^ codes[i];
    }
    return lost == 0;
}

void fill_offsets(const Lattice& lattice, uint64_t start, size_t count, Cells& cells) {
    if (lattice.powers) return fill_exponents(lattice, start, count, cells.exponents);
    if (lattice.seed != 0)
        fill_dithers(lattice.seed, start, count, cells.dithers);
    else if (cells.is_dithered)
        std::fill_n(cells.dithers, kTile, 0.0f);
    cells.is_dithered = lattice.seed != 0;
}

void fill_cells(const Lattice& lattice, const float* roots, uint64_t start, size_t count, Cells& cells) {
    fill_offsets(lattice, start, count, cells);
    if (lattice.powers) return;
    fill_steps(lattice, start, count, cells.steps);
    if (roots != nullptr) multiply(roots, count, cells.steps);
}

void fill_relative_cells(const Lattice& lattice, const CodedMoments& seconds, uint64_t start, size_t count,
                         Cells& cells) {
    roots_of_codes(*seconds.lattice, seconds.codes, 0, start, count, cells, cells.values);
    fill_cells(lattice, cells.values, start, count, cells);
}

void roots_of_codes(const Lattice& seconds, Codes codes, uint64_t first, uint64_t start, size_t count, Cells& cells,
                    float* roots) {
    fill_exponents(seconds, first + start, count, cells.exponents);
    make_power_roots(read_codes(codes, start, count, cells.codes), cells.exponents, seconds.step, count, roots);
}

void values_of_codes(const Lattice& lattice, const int16_t* codes, uint64_t start, size_t count, Cells& cells,
                     float* values) {
    if (lattice.powers)
        make_powers(codes, cells.exponents, lattice.step, count, values);
    else if (lattice.excess_gain != 0.0f)
        make_gained_multiples(codes, read_codes(lattice.origin, start, count, cells.origins), lattice.excess_gain,
                              cells.steps, cells.dithers, count, values);
    else
        make_multiples(codes, cells.steps, cells.dithers, count, values);
}

}  // namespace shrinkpoint
