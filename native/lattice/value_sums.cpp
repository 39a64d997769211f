#include "lattice/value_sums.hpp"

#include <algorithm>
#include <vector>

#include "base/bits.hpp"
#include "base/lanes.hpp"
#include "base/simd.hpp"
#include "lattice/cells.hpp"
#include "lattice/parallel_tiles.hpp"

namespace shrinkpoint {

namespace {

constexpr size_t kLanes = 16;

struct Lanes {
    double sum[kLanes] = {}, squares[kLanes] = {};
    int32_t max_bits = 0;
};

struct Buffer {
    float values[kTile];
};

// Sums distances from `origin`, so that nothing is lost if the mean is far from zero.
SHRINKPOINT_KERNEL(void, add_values, (const float* values, size_t count, double origin, Lanes& lanes),
                   (values, count, origin, lanes)) {
    int32_t max_bits = lanes.max_bits;
    for (size_t i = 0; i < count; ++i)
        max_bits = std::max(max_bits, static_cast<int32_t>(bits_of(values[i]) & 0x7fffffff));
    lanes.max_bits = max_bits;
    double sum[kLanes], squares[kLanes];
    std::copy_n(lanes.sum, kLanes, sum), std::copy_n(lanes.squares, kLanes, squares);
    const auto add = [&](size_t i, size_t lane) {
        const double distance = values[i] - origin;
        sum[lane] += distance;
        squares[lane] += distance * distance;
    };
    by_lanes<kLanes>(count, add);
    std::copy_n(sum, kLanes, lanes.sum), std::copy_n(squares, kLanes, lanes.squares);
}

}  // namespace

ValueSums value_sums(Floats values, uint64_t count, unsigned threads) {
    ValueSums out;
    if (count == 0) return out;
    std::vector<Lanes> pieces(chunk_count(count, kPiece));
    float first;
    const double origin = *read_floats(values, 0, 1, &first);
    by_tiles<Buffer>(count, threads, [&](size_t piece, uint64_t start, size_t length, Buffer& buffer) {
        add_values(read_floats(values, start, length, buffer.values), length, origin, pieces[piece]);
    });
    int32_t max_bits = 0;
    double sum = 0, squares = 0;
    for (const Lanes& lanes : pieces) {  // in the order of pieces, whichever thread had them
        for (size_t lane = 0; lane < kLanes; ++lane) sum += lanes.sum[lane], squares += lanes.squares[lane];
        max_bits = std::max(max_bits, lanes.max_bits);
    }
    const auto length = static_cast<double>(count);
    out.max_magnitude = float_of(static_cast<uint32_t>(max_bits));
    out.mean = origin + sum / length;
    out.squared_deviations = std::max(0.0, squares - sum / length * sum);
    return out;
}

}  // namespace shrinkpoint
