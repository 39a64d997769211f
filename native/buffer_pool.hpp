// Memory that is handed back to this process and not to the system.
//
// The first touch of a fresh page costs more than coding the values that go there, and every record asks for the same
// few sizes again. So large blocks are kept when they are freed, up to a bound.
#pragma once
#include <cstddef>

namespace shrinkpoint {

constexpr size_t kPooledFrom = size_t{1} << 16;  // bytes; smaller blocks are malloc's business
constexpr size_t kPoolBound = size_t{32} << 20;  // bytes kept at most

// At least `size` bytes, aligned like malloc's. Throws std::bad_alloc.
void* pool_take(size_t size);
void pool_give(void* block) noexcept;

}  // namespace shrinkpoint
