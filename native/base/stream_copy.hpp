// Copies into memory that nobody reads soon.
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

// Copies past the caches: the targets' lines are not read before they are written, and drop nothing else.
void stream_copy(const std::vector<Copy>& copies, unsigned threads);

}  // namespace shrinkpoint
