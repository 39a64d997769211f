// Places of some values of many: chosen, written, read, and bytes that say no places.
#include <algorithm>
#include <numeric>
#include <vector>

#include "checks.hpp"
#include "wire_sparse.hpp"

namespace shrinkpoint {

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;

unsigned bits_for(uint64_t n) {
    unsigned out = 1;
    while (n > 1 && out < kMostPlaceBits && (n - 1) >> out != 0) ++out;
    return out;
}

// k of n places, evenly or in runs.
std::vector<int64_t> make_places(Choices& choose, uint64_t n, uint64_t k) {
    std::vector<int64_t> out;
    const bool first = choose.one_in(8);
    for (uint64_t place = 0; out.size() < k; ++place)
        if (first || choose.word() % (n - place) < k - out.size()) out.push_back(static_cast<int64_t>(place));
    return out;
}

// k of so many places that no array has as many elements.
std::vector<int64_t> make_far_places(Choices& choose, uint64_t n, uint64_t k) {
    std::vector<int64_t> out;
    for (uint64_t i = 0; i < k; ++i) out.push_back(static_cast<int64_t>(choose.word() % n));
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
}

// A code that loses no places, however long it is.
PlaceCode make_code(Choices& choose, uint64_t n, uint64_t k) {
    const unsigned full = bits_for(n), least = full > 16 ? full - 16 : 0;
    if (k == n && choose.one_in(2)) return {PlaceForm::All, n, k, 0};
    if (n < 1 << 20 && choose.one_in(3)) return {PlaceForm::Bitmap, n, k, choose.below(2)};
    if (choose.one_in(2)) return {PlaceForm::Packed, n, k, std::min(full + choose.below(9) / 5, kMostPlaceBits)};
    return {PlaceForm::Split, n, k, std::min(least + choose.below(full - least + 3), kMostPlaceBits)};
}

// As the binding takes them; the bitmap of such a message is not too long to be made.
void change(Choices& choose, PlaceCode& code) {
    code.form = static_cast<PlaceForm>(choose.below(4));
    code.width = choose.below(kMostPlaceBits + 1);
    if (choose.one_in(3)) code.n = choose.one_in(2) ? choose.word() >> (8 + choose.below(56)) : choose.below(3000);
    if (choose.one_in(3)) code.k = choose.below(200);
    code.k = std::min(code.k, code.n);
}

struct Read {
    bool fine;
    Bytes places;

    bool operator==(const Read& other) const { return fine == other.fine && (!fine || places == other.places); }
};

Read read(const PlaceCode& code, const Bytes& message, size_t shift) {
    const Unaligned data(shift, message);
    const Exact places(Bytes(8 * code.k, 0xa5));
    const bool fine = decode_places(code, data.data(), reinterpret_cast<int64_t*>(places.data()));
    return {fine, Bytes(places.data(), places.data() + 8 * code.k)};
}

Read write(const PlaceCode& code, const Bytes& places, size_t shift) {
    const Exact from(places);
    const Unaligned out(shift, Bytes(code.size(), 0xa5));
    const bool fine = encode_places(code, reinterpret_cast<const int64_t*>(from.data()), out.data());
    return {fine, Bytes(out.data(), out.data() + code.size())};
}

bool are_places(const std::vector<int64_t>& places, uint64_t n) {
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] < 0 || static_cast<uint64_t>(places[i]) >= n) return false;
        if (i > 0 && places[i] <= places[i - 1]) return false;
    }
    return true;
}

// Values where the message says, zeros elsewhere; nothing where it says no places.
void check_spread(Choices& choose, const PlaceCode& code, const Bytes& message, const Read& known) {
    if (code.n > 1 << 18) return;
    const size_t width = size_t{2} << choose.below(3), size = code.n * width;
    const Bytes chosen = choose.bytes(code.k * width);
    const Unaligned data(choose.below(8), message), values(choose.below(8), chosen);
    const Unaligned out(choose.below(8), Bytes(size, 0xa5));
    const bool fine = decode_spread(code, data.data(), values.data(), width, out.data());
    expect(fine == known.fine, "places are refused, but not where they are spread, or the other way round");
    Bytes wanted(size, fine ? 0 : 0xa5);
    const std::vector<int64_t> places = elements<int64_t>(known.places);
    for (size_t i = 0; fine && i < places.size(); ++i)
        std::copy_n(chosen.begin() + static_cast<ptrdiff_t>(i * width), width,
                    wanted.begin() + static_cast<ptrdiff_t>(places[i]) * static_cast<ptrdiff_t>(width));
    expect(std::equal(wanted.begin(), wanted.end(), out.data()), "values are not where they should be");
}

void read_mutants(Choices& choose, const PlaceCode& code, const Bytes& message) {
    for (unsigned i = 0; i < 12; ++i) {
        PlaceCode other = code;
        if (choose.one_in(3)) change(choose, other);
        if (other.size() > 1 << 20) continue;
        const Bytes mutant = mutant_of(choose, message, other.size());
        const Read found = read(other, mutant, choose.below(8));
        check_spread(choose, other, mutant, found);
        if (!found.fine) continue;
        expect(are_places(elements<int64_t>(found.places), other.n), "places that do not ascend, or are not there");
        const Read again = write(other, found.places, 0);
        expect(again.fine && read(other, again.places, 0) == found, "places that were read do not come back");
    }
}

// What is refused: as many places, but not in order, or not below n.
void write_wrong(Choices& choose, const PlaceCode& code, std::vector<int64_t> places) {
    if (places.empty()) return;
    int64_t& one = places[choose.below(static_cast<unsigned>(places.size()))];
    switch (choose.below(4)) {
        case 0: one = static_cast<int64_t>(choose.word()); break;
        case 1: one = static_cast<int64_t>(code.n); break;
        case 2: one = -1; break;
        default: one = places[choose.below(static_cast<unsigned>(places.size()))];
    }
    expect(write(code, bytes_of_all(places), 0).fine == are_places(places, code.n), "wrong places are written");
}

// Of each row the k largest magnitudes, of equals the first: by sorting.
std::vector<int64_t> largest_by_sorting(const std::vector<uint32_t>& values, size_t rows, size_t columns, size_t k) {
    std::vector<int64_t> out;
    for (size_t row = 0; row < rows; ++row) {
        std::vector<int64_t> order(columns);
        std::iota(order.begin(), order.end(), static_cast<int64_t>(row * columns));
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return (values[static_cast<size_t>(a)] & kMagnitude) > (values[static_cast<size_t>(b)] & kMagnitude);
        });
        std::sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(k));
        out.insert(out.end(), order.begin(), order.begin() + static_cast<ptrdiff_t>(k));
    }
    return out;
}

Bytes values_at(const std::vector<uint32_t>& values, const std::vector<int64_t>& places) {
    std::vector<uint32_t> out;
    for (const int64_t place : places) out.push_back(values[static_cast<size_t>(place)]);
    return bytes_of_all(out);
}

void check_gather(Choices& choose, const std::vector<uint32_t>& values, std::vector<int64_t> places) {
    for (size_t i = places.size(); i > 1; --i)
        std::swap(places[i - 1], places[choose.below(static_cast<unsigned>(i))]);
    const Bytes chosen = values_at(values, places);
    const auto odd = [](const std::vector<uint32_t>& all) {
        return std::count_if(all.begin(), all.end(), [](uint32_t x) { return (x & kMagnitude) >= kInfinite; });
    };
    const bool wanted = odd(values) > odd(elements<uint32_t>(chosen));
    if (choose.one_in(4) && !places.empty())
        places[choose.below(static_cast<unsigned>(places.size()))] = static_cast<int64_t>(choose.word());
    const bool there = std::all_of(places.begin(), places.end(), [&](int64_t place) {
        return place >= 0 && static_cast<uint64_t>(place) < values.size();
    });
    const Exact from(bytes_of_all(values)), where(bytes_of_all(places));
    const Bytes found = same_everywhere([&](unsigned) {
        const Exact out(Bytes(4 * places.size(), 0xa5));
        bool lost = false;
        const bool fine = gather(from.words(), values.size(), reinterpret_cast<const int64_t*>(where.data()),
                                 places.size(), out.words(), lost);
        expect(fine == there && (!fine || lost == wanted), "places that are not there, or values that are not finite");
        return fine ? Bytes(out.data(), out.data() + 4 * places.size()) : Bytes();
    });
    expect(!there || found == chosen, "not the values of these places");
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
    expect(elements<int64_t>(found) == largest_by_sorting(ranks, 1, n, k), "not the least hashes");
}

}  // namespace

void fuzz_places(Choices& choose) {
    const bool far = choose.one_in(4);
    const uint64_t n = far ? 1 + (choose.word() >> (8 + choose.below(40))) : std::max<size_t>(1, make_count(choose));
    std::vector<int64_t> places;
    if (far) {
        places = make_far_places(choose, n, choose.below(1000));
    } else {
        const uint64_t k = choose.one_in(8) ? n : choose.word() % (n / (choose.one_in(2) ? 10 : 1) + 1);
        places = make_places(choose, n, k);
    }
    const PlaceCode code = make_code(choose, n, places.size());
    const Bytes wanted = bytes_of_all(places);
    const Read message = write(code, wanted, choose.below(8));
    expect(message.fine, "places are refused");
    const Read found = read(code, message.places, choose.below(8));
    expect(found.fine && found.places == wanted, "places do not come back");
    check_spread(choose, code, message.places, found);
    write_wrong(choose, code, places);
    read_mutants(choose, code, message.places);
}

void fuzz_largest(Choices& choose) {
    const size_t count = std::max<size_t>(1, make_count(choose));
    const size_t rows = choose.one_in(2) ? 1 : 1 + choose.below(static_cast<unsigned>(std::min<size_t>(count, 300)));
    const size_t columns = count / rows, n = rows * columns;
    const size_t k = choose.one_in(8) ? columns : 1 + choose.word() % columns;
    const Bytes bytes = make_floats(choose, n);
    const std::vector<uint32_t> values = elements<uint32_t>(bytes);
    const std::vector<int64_t> wanted = largest_by_sorting(values, rows, columns, k);
    const PlaceCode code = make_code(choose, n, rows * k);
    const Exact from(bytes);
    const size_t shift = choose.below(8);
    const Bytes message = same_everywhere([&](unsigned threads) {
        const Unaligned out(shift, Bytes(code.size(), 0xa5)), chosen(7 - shift, Bytes(4 * code.k, 0xa5));
        expect(encode_largest(code, from.words(), rows, out.data(), chosen.data(), threads), "places are refused");
        Bytes all(out.data(), out.data() + code.size());
        all.insert(all.end(), chosen.data(), chosen.data() + 4 * code.k);
        return all;
    });
    const auto border = message.begin() + static_cast<ptrdiff_t>(code.size());
    expect(Bytes(border, message.end()) == values_at(values, wanted), "not the largest magnitudes");
    expect(read(code, Bytes(message.begin(), border), 0) == Read{true, bytes_of_all(wanted)}, "not their places");
    check_gather(choose, values, wanted);
    check_hashes(choose, n, k);
}

}  // namespace shrinkpoint
