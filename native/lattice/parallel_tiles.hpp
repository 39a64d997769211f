// Divides an array among threads in pieces and works through each piece in tiles.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/parallel.hpp"
#include "entropy/predict.hpp"
#include "entropy/tiles.hpp"

namespace shrinkpoint {

constexpr size_t kPiece = size_t{1} << 17;  // positions that a thread takes at a time

// Calls work(piece, start, count, buffers) for every tile of `count` positions. Each thread has its own buffers, which
// start as zeros. Results depend neither on the caller's rounding mode nor on its treatment of denormals.
template <typename Buffers, typename Work>
void by_tiles(uint64_t count, unsigned threads, Work work) {
    parallel(chunk_count(count, kPiece), threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        const auto buffers = std::make_unique<Buffers>();
        for (size_t index; indices.take(index);) {
            const Span piece = span_of(index, count, kPiece, kPiece);
            for (size_t done = 0; done < piece.count; done += kTile)
                work(index, piece.start + done, std::min(kTile, piece.count - done), *buffers);
        }
    });
}

}  // namespace shrinkpoint
