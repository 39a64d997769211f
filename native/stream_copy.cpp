#include "stream_copy.hpp"

#include <algorithm>
#include <cstring>

#include "parallel.hpp"
#include "simd.hpp"

#if defined(SHRINKPOINT_X86)
#include <emmintrin.h>
#endif

namespace shrinkpoint {

namespace {

constexpr size_t kPiece = size_t{1} << 21;  // bytes that a thread takes at a time

#if defined(SHRINKPOINT_X86)

constexpr size_t kLine = 64, kPage = 4096;
constexpr size_t kPages = 4;  // copied line by line side by side: memory serves several streams faster than one

void stream_line(const uint8_t* source, uint8_t* target) {
    __m128i parts[4];
    for (unsigned i = 0; i < 4; ++i) parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 16 * i));
    for (unsigned i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(target + 16 * i), parts[i]);
}

void copy_piece(const uint8_t* source, size_t size, uint8_t* target) {
    const size_t head = std::min(size, (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine);
    std::memcpy(target, source, head);
    size_t done = head;
    for (; done + kPages * kPage <= size; done += kPages * kPage)
        for (size_t line = done; line < done + kPage; line += kLine)
            for (size_t page = 0; page < kPages * kPage; page += kPage)
                stream_line(source + line + page, target + line + page);
    std::memcpy(target + done, source + done, size - done);
    _mm_sfence();  // streamed lines become visible to others with what is written after them
}

#else

void copy_piece(const uint8_t* source, size_t size, uint8_t* target) { std::memcpy(target, source, size); }

#endif

}  // namespace

void stream_copy(const uint8_t* source, size_t size, uint8_t* target, unsigned threads) {
    parallel(chunk_count(size, kPiece), threads, [&](WorkQueue& indices) {
        for (size_t i; indices.take(i);) {
            const Span piece = span_of(i, size, kPiece, kPiece);
            copy_piece(source + piece.start, piece.count, target + piece.start);
        }
    });
}

}  // namespace shrinkpoint
