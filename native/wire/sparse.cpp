#include "wire/sparse.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/buffer.hpp"
#include "base/parallel.hpp"
#include "base/simd.hpp"

namespace shrinkpoint {

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinite = 0x7f800000;
constexpr unsigned kMagnitudeBits = 31;
constexpr unsigned kBucketBits = 11;  // the exponent and three bits of the mantissa
constexpr unsigned kRestBits = kMagnitudeBits - kBucketBits;
constexpr size_t kBuckets = size_t{1} << kBucketBits;
constexpr size_t kLanes = 4;       // histograms side by side: neighbours often fall into one bucket
constexpr size_t kCounted = 2048;  // values from which on clearing and reading histograms pays
constexpr size_t kBlock = 64;
constexpr size_t kShare = 1 << 15;  // values that a thread takes at a time

using Words = std::vector<uint32_t, UninitializedAllocator<uint32_t>>;
using IndexVector = std::vector<int64_t, UninitializedAllocator<int64_t>>;

size_t bytes_for(uint64_t bits) { return static_cast<size_t>((bits + 7) / 8); }

unsigned trailing_zeros(uint64_t x) {
#if defined(__GNUC__)
    return static_cast<unsigned>(__builtin_ctzll(x));
#else
    unsigned count = 0;
    for (; (x & 1) == 0; x >>= 1) ++count;
    return count;
#endif
}

// A threshold that at least as many magnitudes reach as are wanted; `exact` if exactly as many.
struct Threshold {
    uint32_t least;
    bool exact;
};

// The largest threshold between `start` and `start` plus `bits` more bits that at least k of n values reach.
SHRINKPOINT_KERNEL(Threshold, search, (const uint32_t* x, size_t n, size_t k, uint32_t start, unsigned bits),
                   (x, n, k, start, bits)) {
    uint32_t least = start;
    while (bits-- > 0) {
        const uint32_t tried = least | uint32_t{1} << bits;
        uint32_t count = 0;
        for (size_t i = 0; i < n; ++i)
            count += static_cast<int32_t>(x[i] & kMagnitude) >= static_cast<int32_t>(tried) ? 1u : 0u;
        if (count == k) return {tried, true};
        if (count > k) least = tried;
    }
    return {least, false};
}

// A bit for each of at most 64 values: 1 if its magnitude is `least` or more.
SHRINKPOINT_INLINE uint64_t reached(const uint32_t* x, size_t count, uint32_t least) {
    uint64_t bits = 0;
    for (size_t i = 0; i < count; ++i) bits |= static_cast<uint64_t>((x[i] & kMagnitude) >= least) << i;
    return bits;
}

struct Taken {
    int64_t* indices;
    uint8_t* chosen;  // float32 at any address, or null
    size_t left;      // how many more fit
};

// Appends the values of `least` or more in [start, end) of a row whose first place is `base`.
SHRINKPOINT_KERNEL(void, take,
                   (const uint32_t* x, size_t start, size_t end, uint32_t least, int64_t base, Taken& out),
                   (x, start, end, least, base, out)) {
    Taken next = out;  // a copy: what is written could be anything's bytes, also those of `out`
    for (size_t i = start; i < end; i += kBlock) {
        const size_t count = end - i;
        uint64_t bits = count >= kBlock ? reached(x + i, kBlock, least) : reached(x + i, count, least);
        for (; bits != 0 && next.left > 0; bits &= bits - 1, --next.left) {
            const size_t index = i + trailing_zeros(bits);
            *next.indices++ = base + static_cast<int64_t>(index);
            if (next.chosen == nullptr) continue;
            std::memcpy(next.chosen, x + index, 4);
            next.chosen += 4;
        }
    }
    out = next;
}

void count_buckets(const uint32_t* x, size_t n, std::array<uint32_t, kBuckets>& out) {
    std::array<std::array<uint32_t, kBuckets>, kLanes> counts{};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) ++counts[lane][(x[i + lane] & kMagnitude) >> kRestBits];
    for (; i < n; ++i) ++counts[0][(x[i] & kMagnitude) >> kRestBits];
    for (size_t b = 0; b < kBuckets; ++b) out[b] = counts[0][b] + counts[1][b] + counts[2][b] + counts[3][b];
}

// Appends the indices of one bucket to `out`, which has room for them. Returns their number.
SHRINKPOINT_KERNEL(size_t, collect, (const uint32_t* x, size_t n, uint32_t bucket, uint32_t* out, size_t capacity),
                   (x, n, bucket, out, capacity)) {
    size_t found = 0;
    const auto within = [&](size_t start, size_t count) {
        uint64_t bits = 0;
        for (size_t i = 0; i < count; ++i)
            bits |= static_cast<uint64_t>((x[start + i] & kMagnitude) >> kRestBits == bucket) << i;
        return bits;
    };
    for (size_t i = 0; i < n; i += kBlock)
        for (uint64_t bits = n - i >= kBlock ? within(i, kBlock) : within(i, n - i); bits != 0 && found < capacity;
             bits &= bits - 1)
            out[found++] = x[i + trailing_zeros(bits)];
    return found;
}

Threshold threshold_of(const uint32_t* x, size_t n, size_t k) {
    if (n < kCounted) return search(x, n, k, 0, kMagnitudeBits);
    std::array<uint32_t, kBuckets> counts;
    count_buckets(x, n, counts);
    size_t above = 0;
    uint32_t bucket = kBuckets - 1;
    for (; above + counts[bucket] < k && bucket > 0; --bucket) above += counts[bucket];
    if (above + counts[bucket] == k) return {bucket << kRestBits, true};
    Words within(counts[bucket]);
    const size_t found = collect(x, n, bucket, within.data(), within.size());
    return search(within.data(), found, k - above, bucket << kRestBits, kRestBits);
}

void choose(const uint32_t* x, size_t n, size_t k, int64_t base, int64_t* indices, uint8_t* chosen) {
    const Threshold threshold = threshold_of(x, n, k);
    Taken out{indices, chosen, k};
    if (threshold.exact) return take(x, 0, n, threshold.least, base, out);
    // Keeps the first of equals: drops from the end as many as are too many.
    size_t surplus = 0;
    for (size_t i = 0; i < n; ++i) surplus += (x[i] & kMagnitude) >= threshold.least;
    surplus -= std::min(surplus, k);
    size_t kept = n;
    for (; kept > 0 && surplus > 0; --kept) surplus -= (x[kept - 1] & kMagnitude) == threshold.least;
    take(x, 0, kept, threshold.least, base, out);
    take(x, kept, n, threshold.least + 1, base, out);
}

// ---- indices as bytes

// Sets the bits place(0), place(1), ... place(k - 1), in ascending order, of `size` bytes.
template <typename Place>
void set_bits(uint8_t* bitmap, size_t size, uint64_t k, Place place) {
    uint64_t at = 0, word = 0;  // what will be written there: neighbours often share a word
    const auto write = [&] { std::memcpy(bitmap + 8 * at, &word, std::min<size_t>(8, size - 8 * at)); };
    for (uint64_t i = 0; i < k; ++i) {
        const uint64_t next = place(i);
        if (next >> 6 != at) write(), at = next >> 6, word = 0;
        word |= uint64_t{1} << (next & 63);
    }
    if (k > 0) write();
}

void write_fields(const IndexCode& code, const int64_t* indices, uint8_t* out) {
    const uint64_t mask = (uint64_t{1} << code.width) - 1;
    uint64_t buffer = 0;
    unsigned filled = 0;
    for (uint64_t i = 0; i < code.k; ++i) {
        buffer |= (static_cast<uint64_t>(indices[i]) & mask) << filled;
        for (filled += code.width; filled >= 8; filled -= 8, buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
    }
    if (filled > 0) *out = static_cast<uint8_t>(buffer);
}

// The i-th field of `width` bits in `size` bytes.
uint64_t field(const uint8_t* data, size_t size, unsigned width, uint64_t i) {
    const uint64_t first = i * width, start = first >> 3;
    uint64_t word = 0;
    if (start + 8 <= size)
        std::memcpy(&word, data + start, 8);
    else
        std::memcpy(&word, data + start, size - start);
    return word >> (first & 7) & ((uint64_t{1} << width) - 1);
}

// Calls use(place) for each set bit while it returns true.
template <typename Use>
bool each_bit(const uint8_t* bitmap, size_t size, Use use) {
    for (size_t start = 0; start < size; start += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bitmap + start, std::min<size_t>(8, size - start));
        for (; word != 0; word &= word - 1)
            if (!use(start * 8 + trailing_zeros(word))) return false;
    }
    return true;
}

bool ascending(const int64_t* indices, uint64_t k, uint64_t n) {
    if (k == 0) return true;
    bool fine = indices[0] >= 0;
    for (uint64_t i = 1; i < k; ++i) fine &= indices[i] > indices[i - 1];
    return fine && static_cast<uint64_t>(indices[k - 1]) < n;
}

bool read_bitmap(const IndexCode& code, const uint8_t* data, int64_t* indices) {
    uint64_t found = 0;
    const bool all = each_bit(data, bytes_for(code.n), [&](uint64_t index) {
        if (found == code.k) return false;
        indices[found++] = static_cast<int64_t>(index);
        return true;
    });
    return all && found == code.k;
}

bool read_split(const IndexCode& code, const uint8_t* data, int64_t* indices) {
    const size_t low = code.low_size();
    uint64_t found = 0;
    const bool all = each_bit(data + low, bytes_for(code.bits()), [&](uint64_t index) {
        if (found == code.k) return false;
        const uint64_t high = index - found;
        indices[found] = static_cast<int64_t>(high << code.width | field(data, low, code.width, found));
        ++found;
        return true;
    });
    return all && found == code.k;
}

bool read_packed(const IndexCode& code, const uint8_t* data, int64_t* indices) {
    for (uint64_t i = 0; i < code.k; ++i)
        indices[i] = static_cast<int64_t>(field(data, code.low_size(), code.width, i));
    return true;
}

bool read_all(const IndexCode& code, int64_t* indices) {
    for (uint64_t i = 0; i < code.k; ++i) indices[i] = static_cast<int64_t>(i);
    return true;
}

}  // namespace

size_t IndexCode::low_size() const {
    return form == IndexForm::Packed || form == IndexForm::Split ? bytes_for(k * width) : 0;
}

uint64_t IndexCode::bits() const {
    if (form == IndexForm::Bitmap) return n;
    return form == IndexForm::Split ? k + ((n - 1) >> width) : 0;
}

size_t IndexCode::size() const { return low_size() + bytes_for(bits()); }

bool encode_indices(const IndexCode& code, const int64_t* indices, uint8_t* out) {
    if (!ascending(indices, code.k, code.n)) return false;
    std::memset(out, 0, code.size());
    if (code.low_size() > 0) write_fields(code, indices, out);
    uint8_t* bitmap = out + code.low_size();
    const auto high = [&](uint64_t i) { return (static_cast<uint64_t>(indices[i]) >> code.width) + i; };
    if (code.form == IndexForm::Bitmap)
        set_bits(bitmap, bytes_for(code.bits()), code.k, [&](uint64_t i) { return static_cast<uint64_t>(indices[i]); });
    if (code.form == IndexForm::Split) set_bits(bitmap, bytes_for(code.bits()), code.k, high);
    return true;
}

bool decode_indices(const IndexCode& code, const uint8_t* data, int64_t* indices) {
    bool fine = false;
    switch (code.form) {
        case IndexForm::All: fine = read_all(code, indices); break;
        case IndexForm::Bitmap: fine = read_bitmap(code, data, indices); break;
        case IndexForm::Packed: fine = read_packed(code, data, indices); break;
        case IndexForm::Split: fine = read_split(code, data, indices); break;
    }
    return fine && ascending(indices, code.k, code.n);
}

bool Rows::fits(uint64_t n, uint64_t k) const {
    if (columns == 0 || kept == 0 || kept > columns || columns > UINT32_MAX) return false;
    const uint64_t whole = n / columns, rest = n % columns;
    if (whole > k / kept) return false;
    const uint64_t kept_of_rest = k - whole * kept;
    return rest == 0 ? kept_of_rest == 0 : kept_of_rest > 0 && kept_of_rest <= rest && kept_of_rest <= kept;
}

void largest_magnitudes(const IndexCode& code, const uint32_t* values, Rows rows, int64_t* indices, uint8_t* chosen,
                        unsigned threads) {
    const size_t n = code.n, k = code.k, count = (n + rows.columns - 1) / rows.columns;
    const size_t share = std::max<size_t>(1, kShare / rows.columns);
    parallel((count + share - 1) / share, threads, [&](WorkQueue& queue) {
        for (size_t index = 0; queue.take(index);)
            for (size_t row = index * share; row < std::min(count, (index + 1) * share); ++row) {
                const size_t start = row * rows.columns, first = row * rows.kept;
                choose(values + start, std::min(rows.columns, n - start), std::min(rows.kept, k - first),
                       static_cast<int64_t>(start), indices + first, chosen + 4 * first);
            }
    });
}

bool encode_largest(const IndexCode& code, const uint32_t* values, Rows rows, uint8_t* out, uint8_t* chosen,
                    unsigned threads) {
    IndexVector indices(code.k);
    largest_magnitudes(code, values, rows, indices.data(), chosen, threads);
    return encode_indices(code, indices.data(), out);
}

bool decode_spread(const IndexCode& code, const uint8_t* data, const uint8_t* chosen, size_t width, uint8_t* out) {
    IndexVector indices(code.k);
    if (!decode_indices(code, data, indices.data())) return false;
    std::memset(out, 0, code.n * width);
    const auto put = [&](auto item) {
        for (size_t i = 0; i < code.k; ++i)
            std::memcpy(out + static_cast<size_t>(indices[i]) * sizeof item, chosen + i * sizeof item, sizeof item);
    };
    if (width == 2) put(uint16_t{});
    if (width == 4) put(uint32_t{});
    if (width == 8) put(uint64_t{});
    return true;
}

SHRINKPOINT_KERNEL(size_t, count_not_finite, (const uint32_t* x, size_t n), (x, n)) {
    size_t count = 0;
    for (size_t start = 0; start < n; start += kShare) {
        const size_t end = std::min(n, start + kShare);
        uint32_t here = 0;
        for (size_t i = start; i < end; ++i)
            here += static_cast<int32_t>(x[i] & kMagnitude) >= static_cast<int32_t>(kInfinite) ? 1u : 0u;
        count += here;
    }
    return count;
}

bool gather(const uint32_t* values, size_t n, const int64_t* indices, size_t k, uint32_t* chosen, bool& lost) {
    for (size_t i = 0; i < k; ++i) {
        if (static_cast<uint64_t>(indices[i]) >= n) return false;
        chosen[i] = values[indices[i]];
    }
    lost = count_not_finite(values, n) > count_not_finite(chosen, k);
    return true;
}

SHRINKPOINT_KERNEL(void, fill_ranks, (uint32_t seed, size_t n, uint32_t* out), (seed, n, out)) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u + seed;
        x = (x ^ x >> 16) * 0x7FEB352Du;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        out[i] = kMagnitude - ((x ^ x >> 16) >> 1);
    }
}

void least_hashes(uint32_t seed, size_t n, size_t k, int64_t* indices) {
    Words ranks(n);
    fill_ranks(seed, n, ranks.data());
    choose(ranks.data(), n, k, 0, indices, nullptr);
}

}  // namespace shrinkpoint
