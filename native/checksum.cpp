#include "checksum.hpp"

#include <new>

#define XXH_STATIC_LINKING_ONLY
#define XXH_INLINE_ALL
#include "xxhash.h"

namespace shrinkpoint {

namespace {
XXH3_state_t* cast(void* state) { return static_cast<XXH3_state_t*>(state); }
}  // namespace

Digest128 xxh3_128(const uint8_t* data, size_t size) {
    const XXH128_hash_t hash = XXH3_128bits(data, size);
    return {hash.high64, hash.low64};
}

Hasher::Hasher() : state_(XXH3_createState()) {
    if (state_ == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(cast(state_));
}

Hasher::~Hasher() { XXH3_freeState(cast(state_)); }

void Hasher::update(const uint8_t* data, size_t size) { XXH3_128bits_update(cast(state_), data, size); }

Digest128 Hasher::digest() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(cast(state_));
    return {hash.high64, hash.low64};
}

}  // namespace shrinkpoint
