// XXH3-128, the digest of every record, header and manifest.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

struct Digest128 {
    uint64_t high, low;
};

Digest128 xxh3_128(const uint8_t* data, size_t size);

// A digest of bytes that arrive in pieces. Equals xxh3_128 of their concatenation.
class Hasher {
   public:
    Hasher();
    ~Hasher();
    Hasher(const Hasher&) = delete;
    Hasher& operator=(const Hasher&) = delete;
    void update(const uint8_t* data, size_t size);
    Digest128 digest() const;

   private:
    void* state_;
};

}  // namespace shrinkpoint
