// Copies into memory that nobody reads soon.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// Copies `size` bytes past the caches: the target's lines are not read before they are written, and drop nothing else.
void stream_copy(const uint8_t* source, size_t size, uint8_t* target, unsigned threads);

}  // namespace shrinkpoint
