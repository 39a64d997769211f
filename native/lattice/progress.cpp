#include "lattice/progress.hpp"

#include <vector>

#include "base/lanes.hpp"
#include "base/simd.hpp"
#include "lattice/parallel_tiles.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kLanes = 8;

struct Lanes {
    double movement[kLanes] = {}, stored_movement[kLanes] = {}, weight[kLanes] = {}, stored_weight[kLanes] = {};
};

struct Buffers {
    float weight[kTile], parent_weight[kTile], stored[kTile], parent_stored[kTile];
};

SHRINKPOINT_KERNEL(void, add_products,
                   (const float* weight, const float* parent_weight, const float* stored, const float* parent_stored,
                    size_t count, Lanes& lanes),
                   (weight, parent_weight, stored, parent_stored, count, lanes)) {
    Lanes sums = lanes;
    const auto add = [&](size_t i, size_t lane) {
        const double now = weight[i], decoded = stored[i];
        const double movement = weight[i] - parent_weight[i], stored_movement = stored[i] - parent_stored[i];
        sums.movement[lane] += movement * movement;
        sums.stored_movement[lane] += movement * stored_movement;
        sums.weight[lane] += now * now;
        sums.stored_weight[lane] += now * decoded;
    };
    by_lanes<kLanes>(count, add);
    lanes = sums;
}

}  // namespace

ProgressSums progress_sums(Floats weight, Floats parent_weight, Floats stored, Floats parent_stored, uint64_t count,
                           unsigned threads) {
    std::vector<Lanes> pieces(chunk_count(count, kPiece));
    by_tiles<Buffers>(count, threads, [&](size_t piece, uint64_t start, size_t length, Buffers& buffers) {
        add_products(read_floats(weight, start, length, buffers.weight),
                     read_floats(parent_weight, start, length, buffers.parent_weight),
                     read_floats(stored, start, length, buffers.stored),
                     read_floats(parent_stored, start, length, buffers.parent_stored), length, pieces[piece]);
    });
    ProgressSums sums;
    for (const Lanes& lanes : pieces) {  // in the order of pieces, whichever thread had them
        sums.movement += sum_lanes(lanes.movement);
        sums.stored_movement += sum_lanes(lanes.stored_movement);
        sums.weight += sum_lanes(lanes.weight);
        sums.stored_weight += sum_lanes(lanes.stored_weight);
    }
    return sums;
}

}  // namespace shrinkpoint
