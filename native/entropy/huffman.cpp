#include "entropy/huffman.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace shrinkpoint {

namespace {

constexpr unsigned kTableBits = 12;    // longer codes are rare and searched bit by bit
constexpr unsigned kLengthBits = 4;
constexpr uint32_t kWhole = 1u << kMaxCodeBits;  // total share of a complete code

uint32_t room_of(unsigned length) { return kWhole >> length; }

unsigned log2_of(uint64_t n) { return 63 - static_cast<unsigned>(__builtin_clzll(n)); }

// ---- package-merge -----------------------------------------------------------------------------------------------

struct Package {
    uint64_t weight;
    int32_t symbol;  // or -1, and two packages of the level below from `pair` on
    uint32_t pair;
};
using Level = std::vector<Package>;

void count_symbols(const std::vector<Level>& levels, size_t level, const Package& package,
                   std::vector<uint8_t>& lengths) {
    if (package.symbol >= 0) return void(++lengths[static_cast<size_t>(package.symbol)]);
    for (uint32_t i = package.pair; i < package.pair + 2; ++i)
        count_symbols(levels, level - 1, levels[level - 1][i], lengths);
}

// Merges pairs of the level below with the single symbols, both in ascending order of weight.
Level next_level(const Level& below, const Level& singles) {
    Level pairs, out;
    for (uint32_t i = 0; i + 1 < below.size(); i += 2)
        pairs.push_back({below[i].weight + below[i + 1].weight, -1, i});
    std::merge(singles.begin(), singles.end(), pairs.begin(), pairs.end(), std::back_inserter(out),
               [](const Package& a, const Package& b) { return a.weight < b.weight; });
    return out;
}

}  // namespace

std::vector<uint8_t> huffman_lengths(const std::vector<uint64_t>& counts) {
    std::vector<uint8_t> lengths(counts.size(), 0);
    Level singles;
    for (size_t s = 0; s < counts.size(); ++s)
        if (counts[s] > 0) singles.push_back({counts[s], static_cast<int32_t>(s), 0});
    if (singles.size() == 1) lengths[static_cast<size_t>(singles[0].symbol)] = 1;
    if (singles.size() <= 1) return lengths;
    std::stable_sort(singles.begin(), singles.end(),
                     [](const Package& a, const Package& b) { return a.weight < b.weight; });
    std::vector<Level> levels(1, singles);
    while (levels.size() < kMaxCodeBits) levels.push_back(next_level(levels.back(), singles));
    for (size_t i = 0; i < 2 * singles.size() - 2; ++i)
        count_symbols(levels, levels.size() - 1, levels.back()[i], lengths);
    return lengths;
}

std::vector<HuffmanCode> huffman_codes(const std::vector<uint8_t>& lengths) {
    std::vector<HuffmanCode> out(lengths.size(), {0, 0});
    unsigned code = 0;
    for (unsigned length = 1; length <= kMaxCodeBits; ++length, code <<= 1)
        for (size_t s = 0; s < lengths.size(); ++s) {
            if (lengths[s] != length) continue;
            unsigned reversed = 0;
            for (unsigned b = 0; b < length; ++b) reversed |= (code >> b & 1) << (length - 1 - b);
            out[s] = {static_cast<uint16_t>(reversed), static_cast<uint8_t>(length)};
            ++code;
        }
    return out;
}

// ---- tables: the used symbols, each after the number of unused ones before it ------------------------------------

namespace {

// Calls `use(gap, length)` for each used symbol. A single symbol has length 0 here: readers see from the lengths where
// a table ends, and a single length of 1 bit would not end it.
template <typename Use>
void each_used(const std::vector<uint8_t>& lengths, Use use) {
    const auto used = lengths.size() - static_cast<size_t>(std::count(lengths.begin(), lengths.end(), 0));
    unsigned gap = 0;
    for (const uint8_t length : lengths) {
        if (length == 0) {
            ++gap;
            continue;
        }
        use(gap, used == 1 ? 0u : unsigned{length});
        gap = 0;
    }
}

}  // namespace

void write_lengths(const std::vector<uint8_t>& lengths, BitWriter& bits) {
    each_used(lengths, [&](unsigned gap, unsigned length) {
        const unsigned log = log2_of(gap + 1);
        bits.put(0, log);
        bits.put(1, 1);
        bits.put((gap + 1) & ((1u << log) - 1), log);
        bits.put(length, kLengthBits);
    });
}

uint64_t lengths_bits(const std::vector<uint8_t>& lengths) {
    uint64_t out = 0;
    each_used(lengths, [&](unsigned gap, unsigned) { out += 2 * log2_of(gap + 1) + 1 + kLengthBits; });
    return out;
}

std::vector<uint8_t> read_lengths(BitSource& bits, size_t alphabet) {
    std::vector<uint8_t> out(alphabet, 0);
    uint32_t used = 0;
    for (size_t symbol = 0; used < kWhole; ++symbol) {
        unsigned log = 0;
        while (bits.take(1) == 0) {
            bits.check();  // zeros behind the end would never end
            if (++log > kMaxCodeBits) throw Corrupt("a Huffman code has a symbol beyond its alphabet");
        }
        symbol += (size_t{1} << log | bits.take(log)) - 1;
        const auto length = static_cast<unsigned>(bits.take(kLengthBits));
        bits.check();
        if (symbol >= alphabet) throw Corrupt("a Huffman code has a symbol beyond its alphabet");
        if (length == 0 && used > 0) throw Corrupt("a Huffman code has a symbol that is alone, and others");
        if (length > 0 && used + room_of(length) > kWhole) throw Corrupt("a Huffman code has too many codes");
        used += length > 0 ? room_of(length) : kWhole;
        out[symbol] = static_cast<uint8_t>(length > 0 ? length : 1);
    }
    return out;
}

// ---- decoding ----------------------------------------------------------------------------------------------------

HuffmanDecoder::HuffmanDecoder(const std::vector<uint8_t>& lengths) {
    const unsigned longest = *std::max_element(lengths.begin(), lengths.end());
    table_bits_ = std::min(longest, kTableBits);
    entries_.assign(size_t{1} << table_bits_, 0);
    const std::vector<HuffmanCode> codes = huffman_codes(lengths);
    for (size_t s = 0; s < codes.size(); ++s) {
        if (codes[s].length == 0 || codes[s].length > table_bits_) continue;
        const auto entry = static_cast<uint16_t>(s << 4 | codes[s].length);
        for (size_t slot = codes[s].bits; slot < entries_.size(); slot += size_t{1} << codes[s].length)
            entries_[slot] = entry;
    }
    for (unsigned length = 1; length <= longest; ++length)
        for (size_t s = 0; s < lengths.size(); ++s)
            if (lengths[s] == length) sorted_.push_back(static_cast<uint16_t>(s)), ++counts_[length];
}

unsigned HuffmanDecoder::next_long(BitSource& bits) const {
    const uint64_t ahead = bits.peek(kMaxCodeBits);
    unsigned code = 0, first = 0, shorter = 0;  // first code of a length, number of shorter codes
    for (unsigned length = 1; length <= kMaxCodeBits; ++length) {
        code = code << 1 | static_cast<unsigned>(ahead >> (length - 1) & 1);
        if (code - first < counts_[length]) {
            bits.skip(length);
            return sorted_[shorter + code - first];
        }
        shorter += counts_[length];
        first = (first + counts_[length]) << 1;
    }
    throw Corrupt("bits that are no Huffman code");
}

}  // namespace shrinkpoint
