#include "lattice_quantize.hpp"

#include <atomic>
#include <cmath>
#include <stdexcept>

#include "lattice_cells.hpp"

namespace shrinkpoint {

namespace {

SHRINKPOINT_KERNEL(bool, round_all,
                   (const float* values, const float* steps, const float* dithers, size_t count, int16_t* codes),
                   (values, steps, dithers, count, codes)) {
    uint32_t out_of_range = 0;
    for (size_t i = 0; i < count; ++i) {
        const float quotient = values[i] / steps[i];
        const float position = (steps[i] > 0.0f ? quotient : 0.0f) - dithers[i];  // no step: all points are zero
        out_of_range |= !(std::fabs(position) < static_cast<float>(kMaxCode));
        codes[i] = static_cast<int16_t>(rounded(reachable(position)));
    }
    return out_of_range == 0;
}

SHRINKPOINT_KERNEL(void, apply_hysteresis,
                   (const float* values, const float* steps, const float* dithers, const int16_t* previous,
                    float hysteresis, size_t count, int16_t* codes),
                   (values, steps, dithers, previous, hysteresis, count, codes)) {
    for (size_t i = 0; i < count; ++i) {
        const float position = values[i] / steps[i] - dithers[i];
        codes[i] = std::fabs(position - static_cast<float>(previous[i])) <= hysteresis ? previous[i] : codes[i];
    }
}

}  // namespace

bool lattice_quantize(const Lattice& lattice, Floats values, const float* squares, Codes previous,
                      float hysteresis, int16_t* codes, unsigned threads) {
    if (lattice.powers) throw std::invalid_argument("nearest: points that stand for powers");
    std::atomic<bool> fits{true};
    by_tiles(lattice.count(), threads, [&](size_t, uint64_t start, size_t count, Cells& cells) {
        fill_cells(lattice, offset_by(squares, start), start, count, cells);
        const float* tile_values = read_floats(values, start, count, cells.parent);
        if (!round_all(tile_values, cells.steps, cells.dithers, count, codes + start)) fits = false;
        if (previous.data != nullptr && hysteresis > 0.5f)
            apply_hysteresis(tile_values, cells.steps, cells.dithers,
                             read_codes(previous, start, count, cells.codes), hysteresis, count, codes + start);
    });
    return fits;
}

}  // namespace shrinkpoint
