// Counts how often each symbol occurs under each byte of the parent, for Tokens::Codes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "entropy/context_clustering.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

// Most codes equal the parent's, under few contexts. These pairs are counted by vector comparisons, and only the rest
// by increments.
class CodeCounts {
   public:
    // Contexts are the parent's bytes, at most `largest`.
    explicit CodeCounts(unsigned largest) : largest_(static_cast<uint8_t>(largest)) {}

    // Adds values[0, count), count <= kTile, to `counts`, which has 256 counts for each context. Returns false and adds
    // nothing where vectors do not help: the machine has none, or the pairs differ too much.
    bool add(const uint8_t* values, const uint8_t* base, size_t count, uint32_t* counts);

   private:
    void choose_common(const uint32_t* counts);

    static constexpr size_t kMaxCommon = 32;
    uint8_t largest_;
    uint8_t common_[kMaxCommon];  // contexts under which symbol 0 is frequent
    size_t commons_ = 0, tiles_ = 0;
    bool helps_ = false;
};

}  // namespace shrinkpoint
