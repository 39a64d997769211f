// Fuzzes sparse messages: chosen, written and read, and bytes that hold no indices.
#include <algorithm>
#include <numeric>
#include <vector>

#include "fuzz/checks.hpp"
#include "wire/sparse.hpp"

namespace shrinkpoint {

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;

unsigned bits_for(uint64_t n) {
    unsigned out = 1;
    while (n > 1 && out < kMaxIndexBits && (n - 1) >> out != 0) ++out;
    return out;
}

// Draws k of n indices, evenly or in runs.
std::vector<int64_t> make_indices(Choices& choose, uint64_t n, uint64_t k) {
    std::vector<int64_t> out;
    const bool first = choose.one_in(8);
    for (uint64_t place = 0; out.size() < k; ++place)
        if (first || choose.word() % (n - place) < k - out.size()) out.push_back(static_cast<int64_t>(place));
    return out;
}

// Draws k indices below an n that no array reaches.
std::vector<int64_t> make_far_indices(Choices& choose, uint64_t n, uint64_t k) {
    std::vector<int64_t> out;
    for (uint64_t i = 0; i < k; ++i) out.push_back(static_cast<int64_t>(choose.word() % n));
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
}

// A code that holds all indices, whatever its size.
IndexCode make_code(Choices& choose, uint64_t n, uint64_t k) {
    const unsigned full = bits_for(n), least = full > 16 ? full - 16 : 0;
    if (k == n && choose.one_in(2)) return {IndexForm::All, n, k, 0};
    if (n < 1 << 20 && choose.one_in(3)) return {IndexForm::Bitmap, n, k, choose.below(2)};
    if (choose.one_in(2)) return {IndexForm::Packed, n, k, std::min(full + choose.below(9) / 5, kMaxIndexBits)};
    return {IndexForm::Split, n, k, std::min(least + choose.below(full - least + 3), kMaxIndexBits)};
}

// Changes a code to any that the binding accepts and whose bitmap is small enough to be made.
void change(Choices& choose, IndexCode& code) {
    code.form = static_cast<IndexForm>(choose.below(4));
    code.width = choose.below(kMaxIndexBits + 1);
    if (choose.one_in(3)) code.n = choose.one_in(2) ? choose.word() >> (8 + choose.below(56)) : choose.below(3000);
    if (choose.one_in(3)) code.k = choose.below(200);
    code.k = std::min(code.k, code.n);
}

struct Read {
    bool fine;
    Bytes indices;

    bool operator==(const Read& other) const { return fine == other.fine && (!fine || indices == other.indices); }
};

Read read(const IndexCode& code, const Bytes& message, size_t shift) {
    const Unaligned data(shift, message);
    const Exact indices(Bytes(8 * code.k, 0xa5));
    const bool fine = decode_indices(code, data.data(), reinterpret_cast<int64_t*>(indices.data()));
    return {fine, Bytes(indices.data(), indices.data() + 8 * code.k)};
}

Read write(const IndexCode& code, const Bytes& indices, size_t shift) {
    const Exact from(indices);
    const Unaligned out(shift, Bytes(code.size(), 0xa5));
    const bool fine = encode_indices(code, reinterpret_cast<const int64_t*>(from.data()), out.data());
    return {fine, Bytes(out.data(), out.data() + code.size())};
}

bool are_indices(const std::vector<int64_t>& indices, uint64_t n) {
    for (size_t i = 0; i < indices.size(); ++i) {
        if (indices[i] < 0 || static_cast<uint64_t>(indices[i]) >= n) return false;
        if (i > 0 && indices[i] <= indices[i - 1]) return false;
    }
    return true;
}

// Checks that values are where the message says, with zeros elsewhere, and that nothing is written if it holds no
// indices.
void check_spread(Choices& choose, const IndexCode& code, const Bytes& message, const Read& known) {
    if (code.n > 1 << 18) return;
    const size_t width = size_t{2} << choose.below(3), size = code.n * width;
    const Bytes chosen = choose.bytes(code.k * width);
    const Unaligned data(choose.below(8), message), values(choose.below(8), chosen);
    const Unaligned out(choose.below(8), Bytes(size, 0xa5));
    const bool fine = decode_spread(code, data.data(), values.data(), width, out.data());
    expect(fine == known.fine, "indices are refused, but not where they are spread, or the other way round");
    Bytes wanted(size, fine ? 0 : 0xa5);
    const std::vector<int64_t> indices = elements<int64_t>(known.indices);
    for (size_t i = 0; fine && i < indices.size(); ++i)
        std::copy_n(chosen.begin() + static_cast<ptrdiff_t>(i * width), width,
                    wanted.begin() + static_cast<ptrdiff_t>(indices[i]) * static_cast<ptrdiff_t>(width));
    expect(std::equal(wanted.begin(), wanted.end(), out.data()), "values are not where they should be");
}

void read_mutants(Choices& choose, const IndexCode& code, const Bytes& message) {
    for (unsigned i = 0; i < 12; ++i) {
        IndexCode other = code;
        if (choose.one_in(3)) change(choose, other);
        if (other.size() > 1 << 20) continue;
        const Bytes mutant = mutant_of(choose, message, other.size());
        const Read found = read(other, mutant, choose.below(8));
        check_spread(choose, other, mutant, found);
        if (!found.fine) continue;
        expect(are_indices(elements<int64_t>(found.indices), other.n), "indices that do not ascend, or are not there");
        const Read again = write(other, found.indices, 0);
        expect(again.fine && read(other, again.indices, 0) == found, "indices that were read do not come back");
    }
}

// Checks that indices out of order, or not below n, are refused.
void write_wrong(Choices& choose, const IndexCode& code, std::vector<int64_t> indices) {
    if (indices.empty()) return;
    int64_t& one = indices[choose.below(static_cast<unsigned>(indices.size()))];
    switch (choose.below(4)) {
        case 0: one = static_cast<int64_t>(choose.word()); break;
        case 1: one = static_cast<int64_t>(code.n); break;
        case 2: one = -1; break;
        default: one = indices[choose.below(static_cast<unsigned>(indices.size()))];
    }
    expect(write(code, bytes_of_all(indices), 0).fine == are_indices(indices, code.n), "wrong indices are written");
}

// Chooses the largest magnitudes of each row by sorting, the first of equals, k in all.
std::vector<int64_t> largest_by_sorting(const std::vector<uint32_t>& values, Rows rows, size_t total) {
    std::vector<int64_t> out;
    for (size_t start = 0; start < values.size(); start += rows.columns) {
        const size_t k = std::min(rows.kept, total - out.size());
        std::vector<int64_t> order(std::min(rows.columns, values.size() - start));
        std::iota(order.begin(), order.end(), static_cast<int64_t>(start));
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return (values[static_cast<size_t>(a)] & kMagnitude) > (values[static_cast<size_t>(b)] & kMagnitude);
        });
        std::sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(k));
        out.insert(out.end(), order.begin(), order.begin() + static_cast<ptrdiff_t>(k));
    }
    return out;
}

Bytes values_at(const std::vector<uint32_t>& values, const std::vector<int64_t>& indices) {
    std::vector<uint32_t> out;
    for (const int64_t place : indices) out.push_back(values[static_cast<size_t>(place)]);
    return bytes_of_all(out);
}

void check_gather(Choices& choose, const std::vector<uint32_t>& values, std::vector<int64_t> indices) {
    for (size_t i = indices.size(); i > 1; --i)
        std::swap(indices[i - 1], indices[choose.below(static_cast<unsigned>(i))]);
    const Bytes chosen = values_at(values, indices);
    const auto odd = [](const std::vector<uint32_t>& all) {
        return std::count_if(all.begin(), all.end(), [](uint32_t x) { return (x & kMagnitude) >= kInfinite; });
    };
    const bool wanted = odd(values) > odd(elements<uint32_t>(chosen));
    if (choose.one_in(4) && !indices.empty())
        indices[choose.below(static_cast<unsigned>(indices.size()))] = static_cast<int64_t>(choose.word());
    const bool there = std::all_of(indices.begin(), indices.end(), [&](int64_t place) {
        return place >= 0 && static_cast<uint64_t>(place) < values.size();
    });
    const Exact from(bytes_of_all(values)), where(bytes_of_all(indices));
    const Bytes found = same_everywhere([&](unsigned) {
        const Exact out(Bytes(4 * indices.size(), 0xa5));
        bool lost = false;
        const bool fine = gather(from.words(), values.size(), reinterpret_cast<const int64_t*>(where.data()),
                                 indices.size(), out.words(), lost);
        expect(fine == there && (!fine || lost == wanted), "indices that are not there, or values that are not finite");
        return fine ? Bytes(out.data(), out.data() + 4 * indices.size()) : Bytes();
    });
    expect(!there || found == chosen, "not the values of these indices");
}

uint32_t rank_of(uint32_t seed, uint32_t place) {
    uint32_t x = place * 0x9E3779B1u + seed;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return kMagnitude - ((x ^ x >> 16) >> 1);
}

void check_hashes(Choices& choose, size_t n, size_t k) {
    const auto seed = static_cast<uint32_t>(choose.word());
    std::vector<uint32_t> ranks;
    for (size_t i = 0; i < n; ++i) ranks.push_back(rank_of(seed, static_cast<uint32_t>(i)));
    const Bytes found = same_everywhere([&](unsigned) {
        const Exact out(Bytes(8 * k, 0xa5));
        least_hashes(seed, n, k, reinterpret_cast<int64_t*>(out.data()));
        return Bytes(out.data(), out.data() + 8 * k);
    });
    expect(elements<int64_t>(found) == largest_by_sorting(ranks, {n, k}, k), "not the least hashes");
}

}  // namespace

void fuzz_indices(Choices& choose) {
    const bool far = choose.one_in(4);
    const uint64_t n = far ? 1 + (choose.word() >> (8 + choose.below(40))) : std::max<size_t>(1, make_count(choose));
    std::vector<int64_t> indices;
    if (far) {
        indices = make_far_indices(choose, n, choose.below(1000));
    } else {
        const uint64_t k = choose.one_in(8) ? n : choose.word() % (n / (choose.one_in(2) ? 10 : 1) + 1);
        indices = make_indices(choose, n, k);
    }
    const IndexCode code = make_code(choose, n, indices.size());
    const Bytes wanted = bytes_of_all(indices);
    const Read message = write(code, wanted, choose.below(8));
    expect(message.fine, "indices are refused");
    const Read found = read(code, message.indices, choose.below(8));
    expect(found.fine && found.indices == wanted, "indices do not come back");
    check_spread(choose, code, message.indices, found);
    write_wrong(choose, code, indices);
    read_mutants(choose, code, message.indices);
}

void fuzz_largest(Choices& choose) {
    const size_t count = std::max<size_t>(1, make_count(choose));
    const size_t rows = choose.one_in(2) ? 1 : 1 + choose.below(static_cast<unsigned>(std::min<size_t>(count, 300)));
    const size_t columns = count / rows, rest = choose.one_in(2) ? 0 : choose.word() % columns;
    const size_t n = rows * columns + rest, kept = choose.one_in(8) ? columns : 1 + choose.word() % columns;
    const size_t k = rows * kept + (rest == 0 ? 0 : 1 + choose.word() % std::min(rest, kept));
    const Bytes bytes = make_floats(choose, n);
    const std::vector<uint32_t> values = elements<uint32_t>(bytes);
    const std::vector<int64_t> wanted = largest_by_sorting(values, {columns, kept}, k);
    const IndexCode code = make_code(choose, n, k);
    const Exact from(bytes);
    const size_t shift = choose.below(8);
    const Bytes message = same_everywhere([&](unsigned threads) {
        const Unaligned out(shift, Bytes(code.size(), 0xa5)), chosen(7 - shift, Bytes(4 * code.k, 0xa5));
        expect(encode_largest(code, from.words(), {columns, kept}, out.data(), chosen.data(), threads), "indices are refused");
        Bytes all(out.data(), out.data() + code.size());
        all.insert(all.end(), chosen.data(), chosen.data() + 4 * code.k);
        return all;
    });
    const auto border = message.begin() + static_cast<ptrdiff_t>(code.size());
    expect(Bytes(border, message.end()) == values_at(values, wanted), "not the largest magnitudes");
    expect(read(code, Bytes(message.begin(), border), 0) == Read{true, bytes_of_all(wanted)}, "not their indices");
    check_gather(choose, values, wanted);
    check_hashes(choose, n, k);
}

}  // namespace shrinkpoint
