#include "progress.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "parallel.hpp"
#include "predict.hpp"
#include "simd.hpp"
#include "tiles.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kPiece = size_t{1} << 17;  // positions that a thread takes at a time
constexpr size_t kLanes = 8;                // sums side by side, in every instruction set as many

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
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    for (size_t lane = 0; i < count; ++i, ++lane) add(i, lane);
    lanes = sums;
}

double sum_lanes(const double* lanes) {
    double sum = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    return sum;
}

}  // namespace

ProgressSums progress_sums(Floats weight, Floats parent_weight, Floats stored, Floats parent_stored, uint64_t count,
                           unsigned threads) {
    std::vector<Lanes> pieces(chunk_count(count, kPiece));
    parallel(pieces.size(), threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;  // sums do not depend on what the caller's thread does with denormals
        const auto buffers = std::make_unique<Buffers>();
        for (size_t index; indices.take(index);) {
            const Span piece = span_of(index, count, kPiece, kPiece);
            for (size_t done = 0; done < piece.count; done += kTile) {
                const uint64_t start = piece.start + done;
                const size_t length = std::min(kTile, piece.count - done);
                add_products(read_floats(weight, start, length, buffers->weight),
                             read_floats(parent_weight, start, length, buffers->parent_weight),
                             read_floats(stored, start, length, buffers->stored),
                             read_floats(parent_stored, start, length, buffers->parent_stored), length, pieces[index]);
            }
        }
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
