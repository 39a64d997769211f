// Memory that is handed back to this process and not to the system.
//
// The first touch of a fresh page costs more than coding the values that go there, and every record asks for the same
// few sizes again. So large blocks are kept when they are freed, up to a bound.
#pragma once
#include <cstddef>

namespace shrinkpoint {

constexpr size_t kPooledFrom = size_t{1} << 16;  // bytes; smaller blocks are malloc's business
// Bytes kept at most, in all and of one block. The codes of an embedding have a block of their own, of which less than
// half is ever touched; without it each save would take as many fresh pages as that record has.
constexpr size_t kPoolBound = size_t{160} << 20, kMaxPooled = size_t{128} << 20;

// At least `size` bytes, aligned like malloc's. Throws std::bad_alloc.
void* pool_take(size_t size);
void pool_give(void* block) noexcept;

}  // namespace shrinkpoint
