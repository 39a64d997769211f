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

struct Scratch {
    float moved[kTile], written[kTile], values[kTile], earlier[kTile];
    int32_t levels[kTile];
    uint32_t places[kTile];
};

// Computes how far points move if codes follow the offsets from the parent's points, and the number of levels from which
// on they do so: 0 if never. `before` becomes the movement of the parent's points since the first ones.
SHRINKPOINT_KERNEL(void, measure_offsets,
                   (const float* values, const float* parent, const float* steps, float scale, float last, size_t count,
                    float* before, float* moved, int32_t* levels),
                   (values, parent, steps, scale, last, count, before, moved, levels)) {
    for (size_t i = 0; i < count; ++i) {
        const float offset = (values[i] - parent[i]) / steps[i], size = std::fabs(offset);
        const float level = std::ceil(std::min((size - 0.5f) * scale, last));
        before[i] = parent[i] - before[i];
        moved[i] = std::rint(offset) * steps[i];
        levels[i] = size > 0.5f ? static_cast<int32_t>(level) : 0;
    }
}

SHRINKPOINT_KERNEL(TileSums, measure_movement,
                   (const float* values, const float* earlier, const float* moved, const float* moved_before,
                    size_t count, float* written),
                   (values, earlier, moved, moved_before, count, written)) {
    double squared[kLanes] = {}, before[kLanes] = {};
    const auto add = [&](size_t i, size_t lane) {
        const float movement = values[i] - earlier[i];
        written[i] = moved[i] * movement;
        squared[lane] += static_cast<double>(movement) * movement;
        before[lane] += static_cast<double>(moved_before[i]) * movement;
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

std::array<MovementSums, 2> movement_sums(const Lattice& lattice, Runs runs, Codes parent, Codes first, Floats values,
                                          const std::array<Floats, 2>& earlier, float max_hysteresis, size_t levels) {
    check(lattice);
    if (!(max_hysteresis > 0.5f) || levels == 0 || levels > kMaxHysteresisLevels)
        throw std::invalid_argument("hysteresis: expected more than 1/2, and 1 to 4096 levels");
    const ScopedFpEnvironment floats;
    const auto cells = std::make_unique<Cells>();
    const auto tile = std::make_unique<Scratch>();
    const float scale = static_cast<float>(levels) / (max_hysteresis - 0.5f);
    std::array<MovementSums, 2> out;
    for (MovementSums& sums : out) sums.written.resize(levels + 1);
    by_tiles_of(runs, kTile, [&](uint64_t start, size_t count, uint64_t place) {
        fill_cells(lattice, nullptr, start, count, *cells);
        values_of_codes(lattice, read_codes(parent, start, count, cells->codes), start, count, *cells, cells->parent);
        values_of_codes(lattice, read_codes(first, start, count, cells->codes), start, count, *cells, cells->values);
        const float* now = read_floats(values, place, count, tile->values);
        measure_offsets(now, cells->parent, cells->steps, scale, static_cast<float>(levels) + 1, count, cells->values,
                        tile->moved, tile->levels);
        size_t leaving = 0;  // values that are written at some level: few, as most stay near their points
        for (size_t i = 0; i < count; ++i) {
            tile->places[leaving] = static_cast<uint32_t>(i);
            leaving += tile->levels[i] != 0;
        }
        for (size_t time = 0; time < out.size(); ++time) {
            const TileSums sums = measure_movement(now, read_floats(earlier[time], place, count, tile->earlier),
                                                   tile->moved, cells->values, count, tile->written);
            out[time].squared += sums.squared, out[time].before += sums.before;
            for (size_t i = 0; i < leaving; ++i) {
                const uint32_t at = tile->places[i];
                out[time].written[static_cast<size_t>(tile->levels[at]) - 1] += tile->written[at];
            }
        }
    });
    for (MovementSums& sums : out)
        for (size_t level = levels; level-- > 0;) sums.written[level] += sums.written[level + 1];
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
