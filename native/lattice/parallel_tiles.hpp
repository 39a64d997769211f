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
constexpr size_t kBlock = kTile / 4;        // positions whose scratch memory fits in the nearest cache

// Calls work(piece, start, count, buffers) for every block of `count` positions. Each thread has its own buffers, which
// start as zeros. Results depend neither on the caller's rounding mode nor on its treatment of denormals.
template <typename Buffers, typename Work>
void by_tiles(uint64_t count, unsigned threads, Work work) {
    parallel(chunk_count(count, kPiece), threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        const auto buffers = std::make_unique<Buffers>();
        for (size_t index; indices.take(index);) {
            const Span piece = span_of(index, count, kPiece, kPiece);
            for (size_t done = 0; done < piece.count; done += kBlock)
                work(index, piece.start + done, std::min(kBlock, piece.count - done), *buffers);
        }
    });
}

}  // namespace shrinkpoint
