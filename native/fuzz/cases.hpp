// The fuzzer's choices, cases and mutants.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "entropy/context_clustering.hpp"
#include "entropy/model.hpp"
#include "entropy/record_codec.hpp"

namespace shrinkpoint {

using Bytes = std::vector<uint8_t>;
using Shapes = std::vector<std::pair<uint64_t, uint64_t>>;

// Reproducible choices: from given bytes while they last, then from a generator (splitmix64) seeded by them.
class Choices {
   public:
    Choices(uint64_t seed, uint64_t number) : state_(seed * 0x9e3779b97f4a7c15u ^ number * 0xd1b54a32d192ed03u) {}
    Choices(const uint8_t* data, size_t size) : next_(data), end_(data + size) {
        for (size_t i = 0; i < size; ++i) state_ = (state_ ^ data[i]) * 0x100000001b3u;
    }

    uint64_t word() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    unsigned below(unsigned n) {
        if (end_ - next_ < 2) return static_cast<unsigned>(word() % n);
        uint16_t two;
        std::memcpy(&two, next_, 2);
        next_ += 2;
        return two % n;
    }
    bool one_in(unsigned n) { return below(n) == 0; }
    // Bytes as given, so that a guided fuzzer reaches streams; then from the generator.
    Bytes bytes(size_t size) {
        Bytes out(size);
        const size_t given = std::min(size, left());
        if (given > 0) std::memcpy(out.data(), next_, given), next_ += given;
        for (size_t i = given; i < size; ++i) out[i] = static_cast<uint8_t>(word() >> 56);
        return out;
    }
    // Given bytes that have not been used yet.
    size_t left() const { return static_cast<size_t>(end_ - next_); }

   private:
    uint64_t state_ = 0;
    const uint8_t *next_ = nullptr, *end_ = nullptr;
};

// A heap block of exactly this size: reading behind it is an error.
class Exact {
   public:
    explicit Exact(const Bytes& bytes) : Exact(bytes, bytes.size()) {}
    // The first `size` bytes, repeated if there are fewer.
    Exact(const Bytes& bytes, size_t size) {
        // An empty block is the end of another block: of an empty allocation one byte could be read.
        block_ = static_cast<uint8_t*>(std::malloc(size > 0 ? size : 8));
        if (block_ == nullptr) throw std::bad_alloc();
        data_ = size > 0 ? block_ : block_ + 8;
        for (size_t i = 0; i < size; i += bytes.size()) {
            if (bytes.empty()) return;
            std::memcpy(data_ + i, bytes.data(), std::min(bytes.size(), size - i));
        }
    }
    ~Exact() { std::free(block_); }
    Exact(const Exact&) = delete;
    Exact& operator=(const Exact&) = delete;

    uint8_t* data() const { return data_; }
    uint32_t* words() const { return reinterpret_cast<uint32_t*>(data_); }
    float* floats() const { return reinterpret_cast<float*>(data_); }

   private:
    uint8_t *block_, *data_;
};

// Same at any address, for bytes that are not read as words.
class Unaligned {
   public:
    Unaligned(size_t shift, const Bytes& bytes) : shift_(shift), block_(moved(shift, bytes)) {}
    uint8_t* data() const { return block_.data() + shift_; }

   private:
    static Bytes moved(size_t shift, Bytes bytes) {
        bytes.insert(bytes.begin(), shift, 0);
        return bytes;
    }

    size_t shift_;
    Exact block_;
};

// Converts between arrays of elements and bytes.
template <typename T>
std::vector<T> elements(const Bytes& bytes) {
    std::vector<T> out(bytes.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
    return out;
}

template <typename T>
Bytes bytes_of_all(const std::vector<T>& all) {
    const auto* first = reinterpret_cast<const uint8_t*>(all.data());
    return Bytes(first, first + all.size() * sizeof(T));
}

// All arguments of decode; an empty array stands for none.
struct Case {
    Model model;
    uint64_t count = 0;
    size_t chunk = 1;
    bool has_factors = false;
    Shapes shapes;
    Bytes base, moment1, moment2, moment1_base, hint, side, codes;
};

// Lays out segments as the binding does. Returns false where the binding would raise.
bool lay_out(const Shapes& shapes, uint64_t count, Factors& out);

// A model that `check` usually accepts, for values of any kind.
Model make_model(Choices& choose, bool factors);
ContextTables make_tables(Choices& choose, unsigned contexts);
// Fills everything but side and codes; the model loses no bits of `values`.
Case make_case(Choices& choose, Bytes& values);

// Number of values of a tensor: few, whole tiles or not, rarely so many that threads share them.
size_t make_count(Choices& choose);
// float32 of any kind: equal, mostly zeros, noise, of similar size, or on a grid; a few are not finite.
Bytes make_floats(Choices& choose, size_t count);

void mutate(Choices& choose, Bytes& bytes, const Bytes& other);
// A mutant of `size` bytes.
Bytes mutant_of(Choices& choose, const Bytes& message, size_t size);
void mutate(Choices& choose, Case& c);

}  // namespace shrinkpoint
