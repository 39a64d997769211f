// Copies into memory that will not be read soon.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shrinkpoint {

struct Copy {
    const uint8_t* source;
    size_t size;
    uint8_t* target;
};

// Copies past the caches: the targets' cache lines are not read first, and evict nothing.
void stream_copy(const std::vector<Copy>& copies, unsigned threads);

}  // namespace shrinkpoint
