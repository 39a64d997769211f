#include "base/stream_copy.hpp"

#include <algorithm>
#include <cstring>

#include "base/parallel.hpp"
#include "base/simd.hpp"

#if defined(SHRINKPOINT_X86)
#include <emmintrin.h>
#endif

namespace shrinkpoint {

namespace {

constexpr size_t kPiece = size_t{1} << 21;  // bytes that a thread takes at a time, at most

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

void stream_copy(const std::vector<Copy>& copies, unsigned threads) {
    std::vector<Copy> pieces;
    size_t total = 0;
    for (const Copy& copy : copies) {
        total += copy.size;
        for (size_t begin = 0; begin < copy.size; begin += kPiece)
            pieces.push_back({copy.source + begin, std::min(kPiece, copy.size - begin), copy.target + begin});
    }
    const size_t useful_threads = std::min<size_t>(threads, total / kPiece + 1);
    parallel(pieces.size(), static_cast<unsigned>(useful_threads), [&](WorkQueue& indices) {
        for (size_t i; indices.take(i);) copy_piece(pieces[i].source, pieces[i].size, pieces[i].target);
    });
}

}  // namespace shrinkpoint
