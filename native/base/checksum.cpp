#include "base/checksum.hpp"

#include <new>

#include "base/simd.hpp"

#if defined(SHRINKPOINT_X86)
#include <immintrin.h>
#define XXH_X86DISPATCH
#define XXH_DISPATCH_AVX2 1
#define XXH_DISPATCH_AVX512 1
#define XXH_TARGET_AVX2 SHRINKPOINT_AVX2
#define XXH_TARGET_AVX512 SHRINKPOINT_AVX512
#endif
#define XXH_STATIC_LINKING_ONLY
#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

namespace shrinkpoint {

namespace {

XXH3_state_t* cast(void* state) { return static_cast<XXH3_state_t*>(state); }

#if defined(SHRINKPOINT_X86)

// Compiles xxhash.h's loop for long inputs under wider instruction sets, as xxHash's own dispatching file does. Digests
// are the same.
constexpr size_t kLong = 1024;

SHRINKPOINT_AVX2 XXH128_hash_t hash_avx2(const uint8_t* data, size_t size) {
    return XXH3_hashLong_128b_internal(data, size, XXH3_kSecret, sizeof XXH3_kSecret, XXH3_accumulate_512_avx2,
                                       XXH3_scrambleAcc_avx2);
}
SHRINKPOINT_AVX512 XXH128_hash_t hash_avx512(const uint8_t* data, size_t size) {
    return XXH3_hashLong_128b_internal(data, size, XXH3_kSecret, sizeof XXH3_kSecret, XXH3_accumulate_512_avx512,
                                       XXH3_scrambleAcc_avx512);
}
SHRINKPOINT_AVX2 void update_avx2(XXH3_state_t* state, const uint8_t* data, size_t size) {
    XXH3_update(state, data, size, XXH3_accumulate_512_avx2, XXH3_scrambleAcc_avx2);
}
SHRINKPOINT_AVX512 void update_avx512(XXH3_state_t* state, const uint8_t* data, size_t size) {
    XXH3_update(state, data, size, XXH3_accumulate_512_avx512, XXH3_scrambleAcc_avx512);
}

#endif

XXH128_hash_t hash(const uint8_t* data, size_t size) {
#if defined(SHRINKPOINT_X86)
    if (size >= kLong && simd() == Simd::Avx512) return hash_avx512(data, size);
    if (size >= kLong && simd() == Simd::Avx2) return hash_avx2(data, size);
#endif
    return XXH3_128bits(data, size);
}

void update(XXH3_state_t* state, const uint8_t* data, size_t size) {
#if defined(SHRINKPOINT_X86)
    if (size >= kLong && simd() == Simd::Avx512) return update_avx512(state, data, size);
    if (size >= kLong && simd() == Simd::Avx2) return update_avx2(state, data, size);
#endif
    XXH3_128bits_update(state, data, size);
}

}  // namespace

Digest128 xxh3_128(const uint8_t* data, size_t size) {
    const XXH128_hash_t result = hash(data, size);
    return {result.high64, result.low64};
}

Hasher::Hasher() : state_(XXH3_createState()) {
    if (state_ == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(cast(state_));
}

Hasher::~Hasher() { XXH3_freeState(cast(state_)); }

void Hasher::update(const uint8_t* data, size_t size) { shrinkpoint::update(cast(state_), data, size); }

Digest128 Hasher::digest() const {
    const XXH128_hash_t result = XXH3_128bits_digest(cast(state_));
    return {result.high64, result.low64};
}

}  // namespace shrinkpoint
