#include "lattice/movement.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "base/lanes.hpp"
#include "lattice/cells.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kLanes = 8;  // sums side by side, the same number in every instruction set

struct TileSums {
    double squared, before;
};

// Computes offsets from the parent's points in steps, and the movement that is written if codes follow the offsets.
SHRINKPOINT_KERNEL(TileSums, measure_movement,
                   (const float* values, const float* earlier, const float* parent, const float* first,
                    const float* steps, size_t count, float* offsets, float* written),
                   (values, earlier, parent, first, steps, count, offsets, written)) {
    double squared[kLanes] = {}, before[kLanes] = {};
    const auto add = [&](size_t i, size_t lane) {
        const float offset = (values[i] - parent[i]) / steps[i], movement = values[i] - earlier[i];
        offsets[i] = std::fabs(offset);
        written[i] = std::rint(offset) * steps[i] * movement;
        squared[lane] += static_cast<double>(movement) * movement;
        before[lane] += static_cast<double>(parent[i] - first[i]) * movement;
    };
    by_lanes<kLanes>(count, add);
    return {sum_lanes(squared), sum_lanes(before)};
}

SHRINKPOINT_KERNEL(bool, are_near,
                   (const float* values, const float* points, const float* steps, float max_steps, size_t count),
                   (values, points, steps, max_steps, count)) {
    uint32_t far = 0;
    for (size_t i = 0; i < count; ++i) far |= !(std::fabs(values[i] - points[i]) <= max_steps * steps[i]);
    return far == 0;
}

void check(const Lattice& lattice) {
    if (lattice.powers) throw std::invalid_argument("movement: points that stand for powers");
}

}  // namespace

MovementSums movement_sums(const Lattice& lattice, Runs runs, Codes parent, Codes first, Floats values, Floats earlier,
                           float max_hysteresis, size_t levels) {
    check(lattice);
    if (!(max_hysteresis > 0.5f) || levels == 0 || levels > kMaxHysteresisLevels)
        throw std::invalid_argument("hysteresis: expected more than 1/2, and 1 to 4096 levels");
    const ScopedFpEnvironment floats;
    const auto cells = std::make_unique<Cells>();
    float value_buffer[kTile], earlier_buffer[kTile], offsets[kTile], written[kTile];
    const auto last = static_cast<float>(levels);
    const float scale = static_cast<float>(levels) / (max_hysteresis - 0.5f);
    MovementSums out;
    out.written.resize(levels + 1);
    by_tiles_of(runs, kTile, [&](uint64_t start, size_t count, uint64_t place) {
        fill_cells(lattice, nullptr, start, count, *cells);
        values_of_codes(lattice, read_codes(parent, start, count, cells->codes), start, count, *cells, cells->parent);
        values_of_codes(lattice, read_codes(first, start, count, cells->codes), start, count, *cells, cells->values);
        const TileSums sums = measure_movement(read_floats(values, place, count, value_buffer),
                                               read_floats(earlier, place, count, earlier_buffer), cells->parent,
                                               cells->values, cells->steps, count, offsets, written);
        out.squared += sums.squared, out.before += sums.before;
        for (size_t i = 0; i < count; ++i)
            if (offsets[i] > 0.5f)
                out.written[static_cast<size_t>(std::ceil(std::min((offsets[i] - 0.5f) * scale, last + 1))) - 1] +=
                    written[i];
    });
    for (size_t level = levels; level-- > 0;) out.written[level] += out.written[level + 1];
    return out;
}

bool near_points(const Lattice& lattice, Runs runs, Codes codes, Floats values, float max_steps) {
    check(lattice);
    const ScopedFpEnvironment floats;
    const auto cells = std::make_unique<Cells>();
    bool near = true;
    by_tiles_of(runs, kTile, [&](uint64_t start, size_t count, uint64_t place) {
        if (!near) return;
        fill_cells(lattice, nullptr, start, count, *cells);
        values_of_codes(lattice, read_codes(codes, start, count, cells->codes), start, count, *cells, cells->parent);
        near = are_near(read_floats(values, place, count, cells->values), cells->parent, cells->steps, max_steps, count);
    });
    return near;
}

}  // namespace shrinkpoint
