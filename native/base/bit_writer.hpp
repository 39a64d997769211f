// A stream of bit fields of any width up to 64, least significant bit first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shrinkpoint {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bit streams are loaded and stored as little-endian words");

// Bytes past the last field that a reader may load. It never uses them.
constexpr size_t kBitSlack = 8;

class BitWriter {
   public:
    // `out` must have space for every field plus kBitSlack bytes.
    explicit BitWriter(uint8_t* out) : start_(out), out_(out) {}

    // Appends a field of at most 56 bits.
    void put(uint64_t field, unsigned bits) {
        buffer_ |= field << filled_;
        filled_ += bits;
        std::memcpy(out_, &buffer_, 8);
        out_ += filled_ >> 3;
        buffer_ = filled_ < 64 ? buffer_ >> (filled_ & ~7u) : 0;
        filled_ &= 7;
    }

    void put_wide(uint64_t field, unsigned bits) {
        if (bits > 32) {
            put(field & 0xffffffffu, 32);
            field >>= 32;
            bits -= 32;
        }
        put(field, bits);
    }

    // Ends the stream with kBitSlack zero bytes; returns its size.
    size_t finish() {
        const uint64_t zero = 0;
        std::memcpy(out_, &buffer_, 8);
        out_ += filled_ > 0;
        std::memcpy(out_, &zero, 8);
        return static_cast<size_t>(out_ - start_) + kBitSlack;
    }

    // Appends groups of eight 32-bit fields of one width, 4 to 28 bits. Defined where the machine has the instructions.
    void put_groups(const uint32_t* fields, size_t groups, unsigned bits);

   private:
    uint8_t* start_;
    uint8_t* out_;
    uint64_t buffer_ = 0;
    unsigned filled_ = 0;
};

// The `bits` bits at bit `position`; the 8 bytes at position / 8 must be readable. At most 56 bits.
inline uint64_t load_bits(const uint8_t* data, uint64_t position, unsigned bits) {
    uint64_t word;
    std::memcpy(&word, data + (position >> 3), 8);
    return (word >> (position & 7)) & ((uint64_t{1} << bits) - 1);
}

inline uint64_t load_bits_wide(const uint8_t* data, uint64_t position, unsigned bits) {
    if (bits <= 32) return load_bits(data, position, bits);
    return load_bits(data, position, 32) | load_bits(data, position + 32, bits - 32) << 32;
}

}  // namespace shrinkpoint
