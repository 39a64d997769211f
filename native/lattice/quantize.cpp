#include "lattice/quantize.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "base/lanes.hpp"
#include "lattice/cells.hpp"
#include "lattice/parallel_tiles.hpp"

namespace shrinkpoint {

namespace {

SHRINKPOINT_KERNEL(bool, round_all,
                   (const float* values, const float* steps, const float* dithers, size_t count, int16_t* codes),
                   (values, steps, dithers, count, codes)) {
    uint32_t out_of_range = 0;
    for (size_t i = 0; i < count; ++i) {
        const float position = held(steps[i] > 0.0f, values[i] / steps[i]) - dithers[i];  // no step: all points are zero
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

constexpr size_t kLanes = 8;  // sums side by side, the same number in every instruction set

struct Lanes {
    double slope[kLanes] = {}, curvature[kLanes] = {}, squares[kLanes] = {};
};

template <bool kCurved>
SHRINKPOINT_INLINE void add_weighted(const float* values, const float* decoded, const float* slopes,
                                     const float* squares, size_t count, Lanes& lanes) {
    Lanes sums = lanes;
    const auto add = [&](size_t i, size_t lane) {
        const double error = decoded[i] - values[i], square = error * error;
        sums.slope[lane] += slopes[i] * error;
        if (kCurved) sums.curvature[lane] += squares[i] * square;
        sums.squares[lane] += square;
    };
    by_lanes<kLanes>(count, add);
    lanes = sums;
}

SHRINKPOINT_KERNEL(void, add_curved_errors,
                   (const float* values, const float* decoded, const float* slopes, const float* squares, size_t count,
                    Lanes& lanes),
                   (values, decoded, slopes, squares, count, lanes)) {
    add_weighted<true>(values, decoded, slopes, squares, count, lanes);
}

SHRINKPOINT_KERNEL(void, add_errors,
                   (const float* values, const float* decoded, const float* slopes, size_t count, Lanes& lanes),
                   (values, decoded, slopes, count, lanes)) {
    add_weighted<false>(values, decoded, slopes, nullptr, count, lanes);
}

// Sums errors by pieces of an array that several threads take.
class ErrorPieces {
 public:
    ErrorPieces(const ErrorWeights& weights, uint64_t count) : weights_(weights), pieces_(chunk_count(count, kPiece)) {}

    void add(size_t piece, uint64_t start, size_t count, const float* values, const float* decoded) {
        static constexpr float kZeros[kTile] = {};
        alignas(64) float slope_buffer[kTile], square_buffer[kTile];
        const Floats slopes = weights_.slopes, squares = weights_.squares;
        const float* by = slopes.data == nullptr ? kZeros : read_floats(slopes, start, count, slope_buffer);
        if (squares.data == nullptr) return add_errors(values, decoded, by, count, pieces_[piece]);
        add_curved_errors(values, decoded, by, read_floats(squares, start, count, square_buffer), count,
                          pieces_[piece]);
    }

    ErrorSums sum() const {
        ErrorSums out;
        for (const Lanes& lanes : pieces_)  // in the order of pieces, whichever thread had them
            for (size_t lane = 0; lane < kLanes; ++lane) {
                out.slope += lanes.slope[lane], out.curvature += lanes.curvature[lane];
                out.squares += lanes.squares[lane];
            }
        return out;
    }

 private:
    const ErrorWeights weights_;
    std::vector<Lanes> pieces_;
};

}  // namespace

unsigned lattice_quantize(const Lattice& lattice, Floats values, const CodedMoments& seconds, Codes previous,
                          float hysteresis, uint8_t* codes, unsigned code_bytes, unsigned threads,
                          const ErrorWeights& weights, ErrorSums* errors) {
    if (lattice.powers) throw std::invalid_argument("nearest: points that stand for powers");
    if (seconds.lattice != nullptr && !seconds.lattice->powers)
        throw std::invalid_argument("second moments: points that stand for multiples");
    std::atomic<bool> fits{true}, narrow{true};
    ErrorPieces pieces(weights, errors == nullptr ? 0 : lattice.count());
    by_tiles<Cells>(lattice.count(), threads, [&](size_t piece, uint64_t start, size_t count, Cells& cells) {
        if (seconds.lattice != nullptr)
            fill_relative_cells(lattice, seconds, start, count, cells);
        else
            fill_cells(lattice, nullptr, start, count, cells);
        const float* tile_values = read_floats(values, start, count, cells.parent);
        int16_t* tile_codes = code_bytes == 2 ? reinterpret_cast<int16_t*>(codes) + start : cells.guesses;
        if (!round_all(tile_values, cells.steps, cells.dithers, count, tile_codes)) fits = false;
        if (previous.data != nullptr && hysteresis > 0.5f)
            apply_hysteresis(tile_values, cells.steps, cells.dithers,
                             read_codes(previous, start, count, cells.codes), hysteresis, count, tile_codes);
        if (code_bytes == 1 && !narrow_codes(tile_codes, count, reinterpret_cast<int8_t*>(codes) + start))
            narrow = false;
        if (errors == nullptr) return;
        values_of_codes(lattice, tile_codes, start, count, cells, cells.values);
        pieces.add(piece, start, count, tile_values, cells.values);
    });
    if (errors != nullptr) *errors = pieces.sum();
    return !fits ? 0 : code_bytes == 1 && narrow ? 1 : 2;
}

ErrorSums quantization_error_sums(const Lattice& lattice, Codes codes, Floats values, const ErrorWeights& weights,
                                  unsigned threads) {
    if (lattice.powers) throw std::invalid_argument("errors: points that stand for powers");
    ErrorPieces pieces(weights, lattice.count());
    by_tiles<Cells>(lattice.count(), threads, [&](size_t piece, uint64_t start, size_t count, Cells& cells) {
        fill_cells(lattice, nullptr, start, count, cells);
        values_of_codes(lattice, read_codes(codes, start, count, cells.codes), start, count, cells, cells.values);
        pieces.add(piece, start, count, read_floats(values, start, count, cells.parent), cells.values);
    });
    return pieces.sum();
}

}  // namespace shrinkpoint
