// Takes bits from the front of a span, least significant first. Bits behind the end read as zeros, and check() notices.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bit_writer.hpp"
#include "base/error.hpp"

namespace shrinkpoint {

class BitSource {
   public:
    BitSource(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}

    // Leaves at least 56 bits in the buffer.
    void refill() {
        if (end_ - next_ < 8) return refill_slowly();
        uint64_t word;
        std::memcpy(&word, next_, 8);
        buffer_ |= word << filled_;  // bits above `filled_` are the bits that the next refill puts there
        next_ += (63 - filled_) >> 3;
        filled_ |= 56;
    }

    uint64_t peek(unsigned bits) const { return buffer_ & ((uint64_t{1} << bits) - 1); }

    void skip(unsigned bits) {
        buffer_ >>= bits;
        filled_ -= bits;
    }

    // Takes at most 56 bits.
    uint64_t take(unsigned bits) {
        refill();
        const uint64_t out = peek(bits);
        skip(bits);
        return out;
    }

    // Throws Truncated if more was taken than there is.
    void check() const {
        if (8 * uint64_t{beyond_} > filled_) throw Truncated("a bit stream ends too early");
    }

    // Throws unless everything was taken but the zeros that pad the last byte.
    void finish() {
        check();
        refill();
        const uint64_t left = filled_ - 8 * uint64_t{beyond_} + 8 * static_cast<uint64_t>(end_ - next_);
        if (left >= 8 || peek(8) != 0) throw Corrupt("a bit stream goes on after its end");
    }

   private:
    void refill_slowly() {
        for (; filled_ <= 56; filled_ += 8) {
            if (next_ == end_)
                ++beyond_;
            else
                buffer_ |= uint64_t{*next_++} << filled_;
        }
    }

    const uint8_t* next_;
    const uint8_t* end_;
    uint64_t buffer_ = 0;
    unsigned filled_ = 0;
    size_t beyond_ = 0;  // bytes taken from behind the end
};

}  // namespace shrinkpoint
