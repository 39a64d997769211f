#include "entropy/histogram.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/parallel.hpp"
#include "entropy/predict.hpp"
#include "entropy/record_codec.hpp"

namespace shrinkpoint {

std::unique_ptr<TileHistogram> build_histogram(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count,
                                   unsigned stride, unsigned threads) {
    const size_t tiles = chunk_count(count, kTile * stride);
    std::unique_ptr<TileHistogram> all;
    std::mutex mutex;
    constexpr size_t kRun = 64;  // tiles that a thread takes at a time
    parallel(chunk_count(tiles, kRun), threads, [&](WorkQueue& runs) {
        const ScopedFpEnvironment floats;
        auto own = std::make_unique<TileHistogram>(model, arrays);
        for (size_t run; runs.take(run);)
            for (size_t t = run * kRun; t < std::min(tiles, (run + 1) * kRun); ++t)
                own->add(values, span_of(t, count, kTile * stride, kTile));
        const std::lock_guard lock(mutex);
        if (all)
            all->add(*own);
        else
            all = std::move(own);
    });
    return all;
}

double estimate_bits(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, unsigned stride,
               unsigned threads) {
    const auto survey = build_histogram(model, arrays, values, count, stride, threads);
    const ContextCounts counts = survey->counts();
    const ContextTables tables = cluster_contexts(counts);
    const double scale = static_cast<double>(count) / static_cast<double>(survey->positions());
    const double fixed = static_cast<double>(write_tables(tables).size()) * 8;
    const double symbols = cost(counts, tables) - fixed;
    double bits = fixed + scale * (symbols + static_cast<double>(survey->extra_bits()));
    if (arrays.factors != nullptr)
        bits += 8.0 * static_cast<double>(arrays.factors->rows.size() + arrays.factors->columns.size());
    return bits;
}

}  // namespace shrinkpoint
