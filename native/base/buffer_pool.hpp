// Keeps freed memory in this process instead of returning it to the system.
//
// The first touch of a fresh page costs more than coding the values that go there, and every record asks for the same
// few sizes again. So large blocks are kept when they are freed, up to a bound.
#pragma once
#include <cstddef>

namespace shrinkpoint {

constexpr size_t kPooledFrom = size_t{1} << 16;  // bytes; smaller blocks are malloc's business
// Bytes kept at most, in all and of one block. The codes of an embedding have a block of their own, of which less than
// half is ever touched. Without that block each save would take as many fresh pages as the record has.
constexpr size_t kPoolBound = size_t{160} << 20, kMaxPooled = size_t{128} << 20;

// Returns at least `size` bytes, aligned like malloc's. Throws std::bad_alloc.
void* pool_take(size_t size);
void pool_give(void* block) noexcept;

}  // namespace shrinkpoint
