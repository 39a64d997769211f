// Counts how often each symbol occurs in each context. Tables are made from these counts.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>

#include "entropy/byte_model.hpp"
#include "entropy/code_counts.hpp"
#include "entropy/context_clustering.hpp"
#include "entropy/model.hpp"
#include "entropy/tiles.hpp"

namespace shrinkpoint {

// Symbol counts and the sum of extra bits over every `stride`-th tile.
class TileHistogram {
   public:
    TileHistogram(const Model& model, const Arrays& arrays)
        : model_(model),
          arrays_(arrays),
          contexts_(context_count(model, arrays)),
          lanes_(contexts_ <= 64 ? 4 : 1),
          counts_(size_t{lanes_} * contexts_ * 256),
          contexts_of_(model, arrays),
          is_under_parent_(is_under_parent(model, arrays)),
          code_counts_(contexts_ - 1) {
        std::fill(counts_.begin(), counts_.end(), 0);
    }

    void add(const uint8_t* values, Span span) {
        positions_ += span.count;
        if (model_.tokens == Tokens::Planes) return add_planes(values, span);
        if (is_under_parent_ &&
            code_counts_.add(values + span.start, arrays_.base + span.start, span.count, counts_.data()))
            return;
        contexts_of_.fill(span.start, span.count, tile_);
        tokenise(model_, values, span.start, span.count, tile_);
        count_symbols(span.count);
        extra_bits_ += extra_sum(tile_, span.count);
    }

    void add(const TileHistogram& other) {
        for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
        extra_bits_ += other.extra_bits_;
        positions_ += other.positions_;
    }

    ContextCounts counts() const {
        const size_t way = size_t{contexts_} * 256;
        ContextCounts out(counts_.begin(), counts_.begin() + static_cast<ptrdiff_t>(way));
        for (size_t w = 1; w < lanes_; ++w)
            for (size_t i = 0; i < way; ++i) out[i] += counts_[w * way + i];
        return out;
    }
    uint64_t extra_bits() const { return extra_bits_; }
    uint64_t positions() const { return positions_; }

   private:
    // Neighbours often hold the same symbol. Counting them in different tables keeps an increment from waiting for the
    // one before.
    void count_symbols(size_t count) {
        uint32_t* const counts = counts_.data();
        const uint8_t* symbols = tile_.symbols;
        if (!contexts_of_.vary()) return count_bytes(symbols, count, counts, size_t{contexts_} * 256);
        const size_t way = lanes_ > 1 ? size_t{contexts_} * 256 : 0;
        const uint16_t* contexts = tile_.contexts;
        size_t i = 0;
        for (; i + 4 <= count; i += 4)
            for (size_t j = 0; j < 4; ++j) ++counts[j * way + size_t{contexts[i + j]} * 256 + symbols[i + j]];
        for (; i < count; ++i) ++counts[size_t{contexts[i]} * 256 + symbols[i]];
    }

    static void count_bytes(const uint8_t* bytes, size_t count, uint32_t* counts, size_t way) {
        size_t i = 0;
        for (; i + 8 <= count; i += 8) {
            uint64_t eight;
            std::memcpy(&eight, bytes + i, 8);
            for (unsigned j = 0; j < 8; ++j) ++counts[(j & 3) * way + (eight >> (8 * j) & 255)];
        }
        for (; i < count; ++i) ++counts[bytes[i]];
    }

    void add_planes(const uint8_t* values, Span span) {
        const unsigned bytes = bytes_of(model_);
        for (size_t i = 0; i < span.count; ++i)
            for (unsigned p = 0; p < bytes; ++p)
                ++counts_[((i & (lanes_ - 1)) * contexts_ + p) * 256 + values[(span.start + i) * bytes + p]];
    }

    const Model& model_;
    const Arrays& arrays_;
    unsigned contexts_, lanes_;
    ContextCounts counts_;
    uint64_t extra_bits_ = 0, positions_ = 0;
    Contexts contexts_of_;
    const bool is_under_parent_;
    CodeCounts code_counts_;
    Tile tile_;
};

// Counts every `stride`-th tile.
std::unique_ptr<TileHistogram> build_histogram(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count,
                                   unsigned stride, unsigned threads);

}  // namespace shrinkpoint
