#include "entropy/cyclic_delta.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "base/bit_reader.hpp"
#include "base/bit_writer.hpp"
#include "base/error.hpp"
#include "base/simd.hpp"
#include "entropy/huffman.hpp"

namespace shrinkpoint {

namespace {

constexpr unsigned kMaxCodes = 256;

unsigned log2_of(uint64_t n) { return 63 - static_cast<unsigned>(__builtin_clzll(n)); }

// Values, then the classes of runs: class j >= 1 stands for 2^j to 2^(j+1) - 1 values.
size_t alphabet_of(const CyclicDelta& form, size_t count) { return form.modulus + (form.runs ? log2_of(count) : 0); }

SHRINKPOINT_KERNEL(uint8_t, largest, (const uint8_t* codes, size_t count), (codes, count)) {
    uint8_t out = 0;
    for (size_t i = 0; i < count; ++i) out = std::max(out, codes[i]);
    return out;
}

// (a - b) mod modulus, for numbers below the modulus.
SHRINKPOINT_INLINE uint8_t cyclic_difference(unsigned a, unsigned b, unsigned modulus) {
    const unsigned difference = a - b;
    return static_cast<uint8_t>(difference + (modulus & (0u - static_cast<unsigned>(a < b))));
}

SHRINKPOINT_KERNEL(void, subtract, (const uint8_t* a, const uint8_t* b, size_t count, unsigned modulus, uint8_t* out),
                   (a, b, count, modulus, out)) {
    const auto low = static_cast<uint8_t>(modulus);
    for (size_t i = 0; i < count; ++i)
        out[i] = static_cast<uint8_t>(a[i] - b[i] + (a[i] < b[i] ? low : uint8_t{0}));
}

SHRINKPOINT_KERNEL(void, negate, (const uint8_t* codes, size_t count, unsigned modulus, uint8_t* out),
                   (codes, count, modulus, out)) {
    const auto low = static_cast<uint8_t>(modulus);
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>((codes[i] > 0 ? low : uint8_t{0}) - codes[i]);
}

// ---- groups: the positions after each of the codes before --------------------------------------------------------

class Groups {
   public:
    Groups(const CyclicDelta& form, const uint8_t* previous, size_t count) {
        if (previous == nullptr || !form.rearranged) {
            starts_ = {0, count};
            return;
        }
        // Neighbours are often equal. Counted apart, an increment does not wait for the one before.
        std::array<std::array<size_t, kMaxCodes>, 4> counts{};
        for (size_t i = 0; i < count; ++i) ++counts[i & 3][previous[i]];
        starts_.assign(1, 0);
        for (unsigned g = 0; g < kMaxCodes; ++g)
            starts_.push_back(starts_.back() + counts[0][g] + counts[1][g] + counts[2][g] + counts[3][g]);
        several_ = true;
    }

    // True if positions are moved at all.
    bool several() const { return several_; }

    // The place of each group's next position.
    std::array<size_t, kMaxCodes> cursors() const {
        std::array<size_t, kMaxCodes> out;
        std::copy_n(starts_.begin(), kMaxCodes, out.begin());
        return out;
    }

    // Calls `use(start, count)` for each group that has positions.
    template <typename Use>
    void each(Use use) const {
        for (size_t g = 0; g + 1 < starts_.size(); ++g)
            if (starts_[g + 1] > starts_[g]) use(starts_[g], starts_[g + 1] - starts_[g]);
    }

   private:
    std::vector<size_t> starts_;
    bool several_ = false;
};

// ---- encoding ----------------------------------------------------------------------------------------------------

// Length of the run at the front.
size_t run_length(const uint8_t* values, size_t count) {
    const uint64_t same = values[0] * 0x0101010101010101u;
    size_t i = 1;
    for (; i + 8 <= count; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, values + i, 8);
        if (eight != same) return i + static_cast<size_t>(__builtin_ctzll(eight ^ same)) / 8;
    }
    while (i < count && values[i] == values[0]) ++i;
    return i;
}

// Calls `use(value, length)` for each run.
template <typename Use>
void each_run(const uint8_t* values, size_t count, Use use) {
    for (size_t i = 0; i < count;) {
        const size_t length = i + 1 < count && values[i + 1] == values[i] ? run_length(values + i, count - i) : 1;
        use(values[i], length);
        i += length;
    }
}

class GroupEncoder {
   public:
    GroupEncoder(const CyclicDelta& form, const uint8_t* values, size_t count)
        : form_(form), values_(values), count_(count) {
        std::vector<uint64_t> counts(alphabet_of(form, count), 0);
        if (form.runs)
            count_runs(counts);
        else
            count_values(counts);
        lengths_ = huffman_lengths(counts);
        bits_ += lengths_bits(lengths_);
        for (size_t s = 0; s < counts.size(); ++s) bits_ += counts[s] * lengths_[s];
    }

    uint64_t bits() const { return bits_; }

    void write(BitWriter& bits) const {
        write_lengths(lengths_, bits);
        const std::vector<HuffmanCode> codes = huffman_codes(lengths_);
        if (form_.runs)
            write_runs(codes, bits);
        else
            write_values(codes, bits);
    }

   private:
    void count_values(std::vector<uint64_t>& counts) const {
        std::array<std::array<uint64_t, kMaxCodes>, 4> lane_counts{};
        for (size_t i = 0; i < count_; ++i) ++lane_counts[i & 3][values_[i]];
        for (size_t s = 0; s < counts.size(); ++s)
            counts[s] = lane_counts[0][s] + lane_counts[1][s] + lane_counts[2][s] + lane_counts[3][s];
    }

    void count_runs(std::vector<uint64_t>& counts) {
        each_run(values_, count_, [&](uint8_t value, size_t length) {
            ++counts[value];
            if (length == 1) return;
            const unsigned log = log2_of(length);
            ++counts[form_.modulus + log - 1];
            bits_ += log;
        });
    }

    void write_values(const std::vector<HuffmanCode>& codes, BitWriter& bits) const {
        size_t i = 0;
        for (; i + 3 <= count_; i += 3) {  // 45 bits at most
            const HuffmanCode a = codes[values_[i]], b = codes[values_[i + 1]], c = codes[values_[i + 2]];
            const unsigned two = a.length + unsigned{b.length};
            bits.put(uint64_t{a.bits} | uint64_t{b.bits} << a.length | uint64_t{c.bits} << two, two + c.length);
        }
        for (; i < count_; ++i) bits.put(codes[values_[i]].bits, codes[values_[i]].length);
    }

    void write_runs(const std::vector<HuffmanCode>& codes, BitWriter& bits) const {
        each_run(values_, count_, [&](uint8_t value, size_t length) {
            const HuffmanCode code = codes[value];
            if (length == 1) return bits.put(code.bits, code.length);
            const unsigned log = log2_of(length);
            const HuffmanCode run = codes[form_.modulus + log - 1];
            bits.put(uint64_t{code.bits} | uint64_t{run.bits} << code.length, code.length + unsigned{run.length});
            bits.put_wide(length - (size_t{1} << log), log);
        });
    }

    const CyclicDelta& form_;
    const uint8_t* values_;
    size_t count_;
    std::vector<uint8_t> lengths_;
    uint64_t bits_ = 0;
};

// Returns the differences, one group after the other.
Buffer differences(const CyclicDelta& form, const uint8_t* codes, const uint8_t* previous, size_t count,
                   const Groups& groups) {
    Buffer out(count);
    if (previous == nullptr)
        negate(codes, count, form.modulus, out.data());
    else if (!groups.several())
        subtract(previous, codes, count, form.modulus, out.data());
    else {
        std::array<size_t, kMaxCodes> cursors = groups.cursors();
        for (size_t i = 0; i < count; ++i)
            out[cursors[previous[i]]++] = cyclic_difference(previous[i], codes[i], form.modulus);
    }
    return out;
}

}  // namespace

Buffer cyclic_encode(const CyclicDelta& form, const uint8_t* codes, const uint8_t* previous, size_t count) {
    if (form.modulus < 1 || form.modulus > kMaxCodes) throw std::invalid_argument("modulus: expected 1 to 256");
    if (count == 0) return {};
    if (largest(codes, count) >= form.modulus) throw std::invalid_argument("codes: not below the modulus");
    if (previous != nullptr && largest(previous, count) >= form.modulus)
        throw std::invalid_argument("previous: not below the modulus");
    const Groups groups(form, previous, count);
    const Buffer values = differences(form, codes, previous, count, groups);
    std::vector<GroupEncoder> encoders;
    uint64_t bits = 0;
    groups.each([&](size_t start, size_t length) {
        encoders.emplace_back(form, values.data() + start, length);
        bits += encoders.back().bits();
    });
    const auto size = static_cast<size_t>((bits + 7) / 8);
    Buffer out(size + 2 * kBitSlack);
    BitWriter writer(out.data());
    for (const GroupEncoder& encoder : encoders) encoder.write(writer);
    writer.finish();
    out.resize(size);
    return out;
}

// ---- decoding ----------------------------------------------------------------------------------------------------

namespace {

void read_values(const HuffmanDecoder& decoder, BitSource& bits, uint8_t* values, size_t count) {
    size_t i = 0;
    for (; i + 3 <= count; i += 3) {
        bits.refill();
        for (size_t j = 0; j < 3; ++j) values[i + j] = static_cast<uint8_t>(decoder.next(bits));
    }
    for (; i < count; ++i) {
        bits.refill();
        values[i] = static_cast<uint8_t>(decoder.next(bits));
    }
}

void read_runs(const HuffmanDecoder& decoder, unsigned modulus, BitSource& bits, uint8_t* values, size_t count) {
    bool repeats = false;  // true if the previous value can still be repeated
    for (size_t i = 0; i < count;) {
        bits.refill();
        const unsigned symbol = decoder.next(bits);
        if (symbol < modulus) {
            values[i++] = static_cast<uint8_t>(symbol);
            repeats = true;
            continue;
        }
        if (!repeats) throw Corrupt("a run without a value before it");
        const unsigned log = symbol - modulus + 1;  // at most that of `count`, by the alphabet
        const size_t more = (size_t{1} << log) + bits.take(log) - 1;
        if (more > count - i) throw Corrupt("a run goes beyond its group");
        std::memset(values + i, values[i - 1], more);
        i += more;
        repeats = false;
    }
}

void read_group(const CyclicDelta& form, BitSource& bits, uint8_t* values, size_t count) {
    const HuffmanDecoder decoder(read_lengths(bits, alphabet_of(form, count)));
    if (form.runs)
        read_runs(decoder, form.modulus, bits, values, count);
    else
        read_values(decoder, bits, values, count);
    bits.check();
}

}  // namespace

void cyclic_decode(const CyclicDelta& form, const uint8_t* data, size_t size, const uint8_t* previous, uint8_t* out,
                   size_t count) {
    if (form.modulus < 1 || form.modulus > kMaxCodes) throw Corrupt("a modulus is out of range");
    if (previous != nullptr && largest(previous, count) >= form.modulus)
        throw Corrupt("a code of the parent is not below the modulus");
    BitSource bits(data, size);
    if (count == 0) return bits.finish();
    const Groups groups(form, previous, count);
    Buffer grouped(groups.several() ? count : 0);
    uint8_t* values = groups.several() ? grouped.data() : out;
    groups.each([&](size_t start, size_t length) { read_group(form, bits, values + start, length); });
    bits.finish();
    if (previous == nullptr) return negate(out, count, form.modulus, out);
    if (!groups.several()) return subtract(previous, out, count, form.modulus, out);
    std::array<size_t, kMaxCodes> cursors = groups.cursors();
    for (size_t i = 0; i < count; ++i)
        out[i] = cyclic_difference(previous[i], grouped[cursors[previous[i]]++], form.modulus);
}

}  // namespace shrinkpoint
