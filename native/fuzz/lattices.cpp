// Fuzzes lattices: round trips, nearest points, random tokens, and records of codes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "fuzz/checks.hpp"
#include "lattice/codec.hpp"
#include "lattice/grid.hpp"
#include "lattice/quantize.hpp"

namespace shrinkpoint {

namespace {

constexpr int32_t kMaxCode = (1 << 15) - 2;
constexpr int16_t kNothing = -127;

// A lattice and the arrays beside its points; an empty array is missing.
struct Grid {
    Lattice lattice;
    bool tame = false;  // no step is 0 or not finite
    Bytes squares{}, parent{};
    unsigned width = 4;  // bytes of an element of the parent
    std::optional<Lattice> parent_lattice{}, square_lattice{};  // of arrays that are codes, squares of a byte each

    size_t count() const { return static_cast<size_t>(lattice.count()); }
};

struct Stream {
    Bytes guesses, tokens, contexts, escapes;
};

std::vector<int16_t> make_exponents(Choices& choose, size_t count, bool tame) {
    const int spread = tame || choose.one_in(2) ? 20 : choose.one_in(2) ? 960 : 32767;
    std::vector<int16_t> out(count);
    for (int16_t& one : out) one = static_cast<int16_t>(static_cast<int>(choose.word() % (2 * spread + 1)) - spread);
    return out;
}

Lattice make_lattice(Choices& choose, bool tame, uint64_t rows, uint64_t columns) {
    const size_t across = choose.one_in(3) ? 1 : columns;
    return Lattice(choose.one_in(3), make_exponents(choose, rows, tame), make_exponents(choose, across, tame), rows,
                   columns, choose.one_in(3) ? 1 + choose.below(4096) : 1 + choose.below(8),
                   choose.one_in(2) ? 0 : static_cast<uint32_t>(choose.word()));
}

Lattice make_lattice(Choices& choose, bool tame) {
    const size_t count = choose.one_in(8) ? make_count(choose) * 2 : make_count(choose);
    const size_t wanted = choose.one_in(3) ? 1 : choose.one_in(3) ? count : 1 + choose.below(60);
    const size_t rows = std::min(wanted, count), columns = rows == 0 ? choose.below(3) : count / rows;
    return make_lattice(choose, tame, rows, columns);
}

Bytes make_squares(Choices& choose, size_t count, bool tame) {
    if (!tame) return make_floats(choose, count);
    std::vector<float> out(count);
    for (float& one : out) one = static_cast<float>(1 + choose.below(1000)) / 100;
    return bytes_of_all(out);
}

// Codes near 0 or anywhere; some are out of range without a `limit`.
Bytes make_codes(Choices& choose, size_t count, bool limit) {
    const int most = choose.one_in(2) ? 3 : choose.one_in(2) ? 300 : kMaxCode;
    std::vector<int16_t> out(count);
    for (int16_t& one : out) {
        one = static_cast<int16_t>(static_cast<int>(choose.word() % (2 * most + 1)) - most);
        if (choose.one_in(50)) one = kNothing;
        if (!limit && choose.one_in(500)) one = static_cast<int16_t>(choose.word());
    }
    return bytes_of_all(out);
}

Values values_in(const Bytes& bytes, const uint8_t* data, unsigned width, const std::optional<Lattice>& lattice) {
    Values out;
    if (!bytes.empty() && lattice)
        out.lattice = &*lattice, out.codes = {data, width};
    else if (!bytes.empty())
        out.floats = {data, width};
    return out;
}

Values squares_of(const Grid& grid, const Exact& squares) {
    return values_in(grid.squares, squares.data(), grid.square_lattice ? 1 : 4, grid.square_lattice);
}

Known known_of(const Grid& grid, const Exact& parent, const Exact& squares) {
    return {values_in(grid.parent, parent.data(), grid.width, grid.parent_lattice), squares_of(grid, squares)};
}

Bytes joined(const Exact& a, size_t size_a, const Exact& b, size_t size_b) {
    Bytes out(a.data(), a.data() + size_a);
    out.insert(out.end(), b.data(), b.data() + size_b);
    return out;
}

// Bytes of a code: 1 if one byte is enough for all codes, else 2.
unsigned code_width(const Bytes& codes) {
    const std::vector<int16_t> all = elements<int16_t>(codes);
    return std::all_of(all.begin(), all.end(), [](int16_t code) { return -128 <= code && code <= 127; }) ? 1 : 2;
}

Bytes as_codes(const Bytes& codes, unsigned width) {
    if (width == 2) return codes;
    Bytes out;
    for (const int16_t code : elements<int16_t>(codes)) out.push_back(static_cast<uint8_t>(code));
    return out;
}

Bytes values_of(const Grid& grid, const Bytes& codes) {
    const size_t count = grid.count();
    const unsigned width = code_width(codes);
    const Exact squares(grid.squares), points(as_codes(codes, width));
    return same_under_any_rounding([&](unsigned threads) {
        const Exact out(Bytes(4 * count, 0xa5));
        lattice_values(grid.lattice, {points.data(), width}, squares_of(grid, squares), out.floats(), nullptr,
                       {0, count}, threads);
        return Bytes(out.data(), out.data() + 4 * count);
    });
}

// Rounds to bfloat16 towards zero: the upper halves.
Bytes narrowed(const Bytes& floats) {
    std::vector<uint16_t> out;
    for (const uint32_t bits : elements<uint32_t>(floats)) out.push_back(static_cast<uint16_t>(bits >> 16));
    return bytes_of_all(out);
}

Grid make_grid(Choices& choose) {
    const bool tame = choose.one_in(2);
    Grid grid{make_lattice(choose, tame), tame, {}, {}, 4};
    if (choose.one_in(2)) grid.squares = make_squares(choose, grid.count(), tame);
    if (choose.one_in(4)) return grid;
    grid.parent = choose.one_in(3) ? make_floats(choose, grid.count())
                                   : values_of(grid, make_codes(choose, grid.count(), true));
    if (!choose.one_in(3)) return grid;
    grid.width = 2;
    grid.parent = narrowed(grid.parent);
    return grid;
}

// Guesses and contexts.
void guess(const Grid& grid, Stream& out) {
    const size_t count = grid.count();
    const Exact squares(grid.squares), parent(grid.parent);
    const Bytes both = same_under_any_rounding([&](unsigned threads) {
        const Exact guesses(Bytes(2 * count, 0xa5)), contexts(Bytes(count, 0xa5));
        lattice_predict(grid.lattice, known_of(grid, parent, squares), nullptr,
                        reinterpret_cast<int16_t*>(guesses.data()), contexts.data(), {0, count}, threads);
        return joined(guesses, 2 * count, contexts, count);
    });
    out.guesses.assign(both.begin(), both.begin() + static_cast<ptrdiff_t>(2 * count));
    out.contexts.assign(both.begin() + static_cast<ptrdiff_t>(2 * count), both.end());
}

// Tokens and escapes of codes. Returns true if all codes are in range.
bool write(const Grid& grid, const Bytes& codes, const Bytes& expected, Stream& out) {
    const size_t count = grid.count();
    const unsigned width = code_width(codes);
    const Exact squares(grid.squares), parent(grid.parent), points(as_codes(codes, width)), wanted(expected);
    Differences found;
    const Bytes both = same_under_any_rounding([&](unsigned threads) {
        const Exact contexts(Bytes(count, 0xa5)), tokens(Bytes(count, 0xa5));
        found = lattice_encode(grid.lattice, {points.data(), width}, known_of(grid, parent, squares),
                               {expected.empty() ? nullptr : wanted.data(), 4}, {}, contexts.data(), tokens.data(),
                               threads);
        out.escapes = bytes_of_all(found.escapes);
        Bytes all = joined(contexts, count, tokens, count);
        all.insert(all.end(), out.escapes.begin(), out.escapes.end());
        return all;
    });
    const auto at = [&](size_t place) { return both.begin() + static_cast<ptrdiff_t>(place); };
    expect(std::equal(at(0), at(count), out.contexts.begin()), "a lattice's contexts differ");
    out.tokens.assign(at(count), at(2 * count));
    expect(found.same, "points do not stand for their own values");
    return found.in_range;
}

// Runs `work`. Returns true unless it refuses what it reads.
template <typename Work>
bool accepts(Work work) {
    try {
        return passes(work);
    } catch (const std::invalid_argument&) {
        return false;
    }
}

// Decodes codes, then values; nothing if the tokens are refused.
std::optional<Bytes> read(const Grid& grid, const Stream& c, unsigned threads) {
    const size_t count = grid.count();
    const Exact guesses(c.guesses), tokens(c.tokens), contexts(c.contexts), escapes(c.escapes), squares(grid.squares);
    const Exact values(Bytes(4 * count, 0xa5));
    const bool accepted = accepts([&] {
        const DecodeResult result =
            lattice_decode(grid.lattice, tokens.data(), contexts.data(),
                           reinterpret_cast<const int32_t*>(escapes.data()), c.escapes.size() / 4,
                           squares_of(grid, squares), reinterpret_cast<int16_t*>(guesses.data()),
                           {nullptr, 2, values.floats()}, {0, count}, threads);
        expect(result.escapes <= c.escapes.size() / 4, "more escapes than there are");
    });
    if (!accepted) return std::nullopt;
    return joined(guesses, 2 * count, values, 4 * count);
}

// Elements of `size` bytes at some positions; none of a missing array.
Bytes part_of(const Bytes& all, size_t size, Positions positions) {
    if (all.empty()) return Bytes();
    const auto begin = all.begin() + static_cast<ptrdiff_t>(size * positions.first);
    return Bytes(begin, begin + static_cast<ptrdiff_t>(size * positions.count));
}

// Checks that some positions alone have the same guesses, contexts, codes and values as in the whole.
void check_positions(Choices& choose, const Grid& grid, const Stream& c, const Bytes& codes) {
    const size_t first = choose.below(static_cast<unsigned>(grid.count()) + 1);
    const size_t count = choose.below(static_cast<unsigned>(grid.count() - first) + 1);
    const Positions positions{first, count};
    const auto part = [&](const Bytes& all, size_t size) { return part_of(all, size, positions); };
    const Bytes some = part(grid.squares, 4), before = part(grid.parent, grid.width), symbols = part(c.tokens, 1);
    const Exact squares(some), parent(before), tokens(symbols), escapes(c.escapes);
    const Exact guesses(Bytes(2 * count, 0xa5)), contexts(Bytes(count, 0xa5)), values(Bytes(4 * count, 0xa5));
    const Values factors = squares_of(grid, squares);
    auto* points = reinterpret_cast<int16_t*>(guesses.data());
    lattice_predict(grid.lattice, known_of(grid, parent, squares), nullptr, points, contexts.data(), positions,
                    1 + choose.below(2));
    expect(joined(guesses, 2 * count, contexts, count) == [&] {
        Bytes both = part(c.guesses, 2);
        const Bytes under = part(c.contexts, 1);
        both.insert(both.end(), under.begin(), under.end());
        return both;
    }(), "guesses of some positions differ");
    if (!c.escapes.empty()) return;
    lattice_decode(grid.lattice, tokens.data(), contexts.data(), nullptr, 0, factors, points,
                   {nullptr, 2, values.floats()}, positions, 1 + choose.below(2));
    expect(joined(guesses, 2 * count, values, 0) == part(codes, 2), "points of some positions differ");
    expect(joined(values, 4 * count, values, 0) == part(values_of(grid, codes), 4), "values of some positions differ");
}

void read_mutants(Choices& choose, const Grid& grid, const Stream& c) {
    for (unsigned i = 0; i < 8; ++i) {
        Stream mutant = c;
        if (!choose.one_in(3)) mutant.tokens = mutant_of(choose, c.tokens, c.tokens.size());
        if (choose.one_in(3)) mutant.contexts = mutant_of(choose, c.contexts, c.contexts.size());
        if (choose.one_in(4)) mutant.guesses = mutant_of(choose, c.guesses, c.guesses.size());
        const size_t escapes = c.escapes.size() / 4 + choose.below(4);
        mutant.escapes = mutant_of(choose, c.escapes, 4 * (escapes - std::min<size_t>(escapes, choose.below(4))));
        const std::optional<Bytes> made = read(grid, mutant, 1 + (choose.one_in(16) ? 2 : 0));
        if (choose.one_in(4)) expect(read(grid, mutant, 3) == made, "threads differ");
        if (!made) continue;
        const std::vector<int16_t> codes = elements<int16_t>(Bytes(made->begin(), made->end() - 4 * grid.count()));
        for (const int16_t code : codes) expect(std::abs(code) <= kMaxCode, "a point that is too far out");
    }
}

void check_tokens(Choices& choose, const Grid& grid) {
    const Bytes codes = make_codes(choose, grid.count(), choose.one_in(2)), values = values_of(grid, codes);
    Stream c;
    guess(grid, c);
    const bool in_range = write(grid, codes, values, c);
    Bytes wanted = codes;
    wanted.insert(wanted.end(), values.begin(), values.end());
    bool refused = false;
    const Bytes made = same_under_any_rounding([&](unsigned threads) {
        const std::optional<Bytes> one = read(grid, c, threads);
        refused = !one;
        return one.value_or(Bytes());
    });
    expect(refused != in_range, "points are refused that are in range, or others are not");
    expect(refused || made == wanted, "points do not come back");
    if (!refused) check_positions(choose, grid, c, codes);
    read_mutants(choose, grid, c);
}

// Steps and dithers of all positions, as float32.
std::vector<float> steps_of(const Grid& grid) {
    std::vector<float> out(grid.count());
    if (!out.empty()) fill_steps(grid.lattice, 0, out.size(), out.data());
    const std::vector<float> squares = elements<float>(grid.squares);
    for (size_t i = 0; i < squares.size(); ++i) out[i] *= std::sqrt(squares[i]);
    return out;
}

std::vector<float> dithers_of(const Grid& grid) {
    std::vector<float> out(grid.count(), 0.0f);
    if (grid.lattice.seed != 0) fill_dithers(grid.lattice.seed, 0, out.size(), out.data());
    return out;
}

// Second moments on a grid of powers with the shape of another grid; steps relative to them are its own.
struct Seconds {
    Grid grid;
    Bytes codes;
};

Seconds make_seconds(Choices& choose, const Grid& grid) {
    const uint64_t rows = grid.lattice.rows, columns = grid.lattice.columns;
    const Lattice lattice(true, make_exponents(choose, rows, grid.tame), make_exponents(choose, columns, grid.tame),
                          rows, columns, grid.tame ? 1 : 1 + static_cast<int32_t>(choose.below(24)), 0);
    Bytes codes(grid.count());
    for (uint8_t& code : codes) code = static_cast<uint8_t>(choose.one_in(20) ? choose.word() : choose.below(4));
    return {Grid{lattice, grid.tame}, codes};
}

// Codes of values. `code_bytes` is the bytes that a code needs, 0 if codes are not valid.
Bytes nearest(const Grid& grid, const Seconds* seconds, const Bytes& input, unsigned width, const Bytes& before,
              float hold, unsigned& code_bytes) {
    const size_t count = grid.count();
    const unsigned old_bytes = code_width(before);
    const Exact values(input), old(as_codes(before, old_bytes)), second_codes(seconds ? seconds->codes : Bytes());
    const CodedMoments moments = seconds ? CodedMoments{&seconds->grid.lattice, {second_codes.data(), 1}} : CodedMoments();
    Bytes out = same_under_any_rounding([&](unsigned threads) {
        const Exact codes(Bytes(2 * count, 0xa5)), narrow(Bytes(count, 0xa5));
        const Codes previous{before.empty() ? nullptr : old.data(), old_bytes};
        const bool fits =
            lattice_quantize(grid.lattice, {values.data(), width}, moments, previous, hold, codes.data(), 2, threads);
        code_bytes =
            lattice_quantize(grid.lattice, {values.data(), width}, moments, previous, hold, narrow.data(), 1, threads);
        expect(fits == (code_bytes != 0), "codes fit or not by their width");
        Bytes all(codes.data(), codes.data() + 2 * count);
        if (code_bytes == 1) expect(as_codes(all, 1) == Bytes(narrow.data(), narrow.data() + count), "narrow codes differ");
        all.push_back(static_cast<uint8_t>(code_bytes));
        return all;
    });
    out.pop_back();
    return out;
}

void check_nearest(Choices& choose, Grid grid) {
    if (grid.lattice.powers) return;
    std::unique_ptr<Seconds> seconds;
    if (!grid.squares.empty()) {
        seconds = std::make_unique<Seconds>(make_seconds(choose, grid));
        const std::vector<int8_t> narrow = elements<int8_t>(seconds->codes);
        grid.squares = values_of(seconds->grid, bytes_of_all(std::vector<int16_t>(narrow.begin(), narrow.end())));
    }
    const bool narrow = choose.one_in(3), held = choose.one_in(3);
    Bytes wanted = make_floats(choose, grid.count());
    if (choose.one_in(2)) wanted = values_of(grid, make_codes(choose, grid.count(), true));
    if (narrow) wanted = narrowed(wanted);
    const Bytes old = held ? make_codes(choose, grid.count(), false) : Bytes();
    const float hold = choose.one_in(4) ? 0.0f : static_cast<float>(choose.below(400)) / 100;
    unsigned code_bytes = 0;
    const std::vector<int16_t> codes =
        elements<int16_t>(nearest(grid, seconds.get(), wanted, narrow ? 2 : 4, old, hold, code_bytes));
    if (code_bytes == 0) return;
    const std::vector<uint16_t> halves = elements<uint16_t>(wanted);
    std::vector<float> values = elements<float>(wanted);
    if (narrow) values.assign(halves.size(), 0.0f);
    for (size_t i = 0; narrow && i < halves.size(); ++i) {
        const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
        std::memcpy(&values[i], &bits, 4);
    }
    const std::vector<float> steps = steps_of(grid), dithers = dithers_of(grid);
    const std::vector<int16_t> before = elements<int16_t>(old);
    for (size_t i = 0; i < codes.size(); ++i) {
        if (!(steps[i] >= std::numeric_limits<float>::min()) || std::isinf(steps[i])) continue;
        const double at = static_cast<double>(values[i]) / steps[i] - dithers[i], off = std::abs(at - codes[i]);
        const bool kept = held && hold > 0.5f && codes[i] == before[i] && off <= hold + 0.01;
        expect(off <= 0.51 || kept, "not the nearest point");
    }
}

// Checks that a point is the nearest point to its own value.
void check_points_stay(Choices& choose, const Grid& grid) {
    if (!grid.tame || grid.lattice.powers || !grid.squares.empty()) return;
    std::vector<int16_t> codes = elements<int16_t>(make_codes(choose, grid.count(), true));
    for (int16_t& code : codes) code = std::clamp<int16_t>(code, 1 - kMaxCode, kMaxCode - 1);
    unsigned code_bytes = 0;
    const Bytes all = bytes_of_all(codes), back = nearest(grid, nullptr, values_of(grid, all), 4, Bytes(), 0.5f, code_bytes);
    expect(code_bytes != 0 && back == all, "points move");
}

// Checks that a lattice of any arguments is refused or has the size that it claims.
void make_any(Choices& choose) {
    const size_t rows = choose.below(20), columns = choose.below(20);
    const uint64_t height = choose.one_in(4) ? choose.word() : rows, width = choose.one_in(4) ? choose.word() : columns;
    try {
        const Lattice lattice(choose.one_in(2), make_exponents(choose, rows, false),
                              make_exponents(choose, choose.one_in(3) ? 1 : columns, false), height, width,
                              static_cast<int32_t>(choose.below(5000)) - 10, static_cast<uint32_t>(choose.word()));
        if (lattice.count() == 0 || lattice.count() > 400) return;
        const Exact steps(Bytes(4 * lattice.count()));
        fill_steps(lattice, 0, static_cast<size_t>(lattice.count()), steps.floats());
    } catch (const std::invalid_argument&) {
    }
}

// Chunks of a record without escapes. All arrays hold only the positions in these chunks; codes have two bytes each.
struct Record {
    std::vector<Grid> grids;
    std::vector<Positions> positions;  // of each tensor
    Case coded;                        // without arrays
    size_t first = 0, last = 0;
    Bytes guesses{}, contexts{}, codes{};  // of all tensors; no codes for tokens that no writer makes

    ChunkRange range() const { return {coded.count, coded.chunk, first, last}; }
};

void append(Bytes& out, const Bytes& more) { out.insert(out.end(), more.begin(), more.end()); }

// Replaces what is known of a grid by codes: the parent's most often of a byte, and on the grid's own lattice.
void make_known_codes(Choices& choose, Grid& grid) {
    if (choose.one_in(2)) grid.squares.clear();
    if (!grid.squares.empty()) {
        const Seconds seconds = make_seconds(choose, grid);
        grid.square_lattice = seconds.grid.lattice, grid.squares = seconds.codes;
    }
    const Lattice& own = grid.lattice;
    grid.parent_lattice = choose.one_in(3) ? make_lattice(choose, grid.tame, own.rows, own.columns) : own;
    grid.width = 1, grid.parent = choose.bytes(grid.count());
    if (choose.one_in(2)) return;
    const Bytes codes = make_codes(choose, grid.count(), choose.one_in(2));
    grid.width = choose.one_in(4) ? 2 : code_width(codes);
    grid.parent = as_codes(codes, grid.width);
}

// Codes that differ from their guesses by at most a byte. Contexts differ in how much, so that they need several tables.
Bytes make_near(Choices& choose, const Stream& c) {
    int most[kStepClasses], usual = choose.one_in(4) ? static_cast<int>(choose.below(255)) - 127 : 0;
    for (int& one : most) one = choose.one_in(3) ? 127 : static_cast<int>(choose.below(4));
    if (choose.one_in(3)) std::fill_n(most, kStepClasses, most[0]);
    const unsigned rarity = choose.one_in(2) ? 1 : 100;
    std::vector<int16_t> out = elements<int16_t>(c.guesses);
    for (size_t i = 0; i < out.size(); ++i) {
        const uint64_t word = choose.word();
        const int limit = most[c.contexts[i] % kStepClasses], other = static_cast<int>(word % (2 * limit + 1)) - limit;
        const int difference = (word >> 32) % rarity == 0 ? other : usual;
        out[i] = static_cast<int16_t>(std::clamp(out[i] + difference, -kMaxCode, kMaxCode));
    }
    return bytes_of_all(out);
}

// Changes what one tensor is known by, and so the guesses and contexts of the whole record.
void mutate_known(Choices& choose, Record& record) {
    Grid& grid = record.grids[choose.below(static_cast<unsigned>(record.grids.size()))];
    grid.parent = mutant_of(choose, grid.parent, grid.parent.size());
    grid.squares = mutant_of(choose, grid.squares, grid.squares.size());
    record.guesses.clear(), record.contexts.clear();
    for (const Grid& one : record.grids) {
        Stream c;
        guess(one, c);
        append(record.guesses, c.guesses), append(record.contexts, c.contexts);
    }
}

// Makes a record as codec/lattice_record.py does; some have tokens that no writer makes.
Record make_record(Choices& choose) {
    Record out;
    Bytes tokens;
    for (unsigned i = 1 + choose.below(3); i > 0; --i) {
        Grid grid = make_grid(choose);
        if (!choose.one_in(4)) make_known_codes(choose, grid);
        Stream c;
        guess(grid, c);
        const Bytes codes = make_near(choose, c);
        expect(write(grid, codes, Bytes(), c) && c.escapes.empty(), "small differences are escapes");
        append(out.guesses, c.guesses), append(out.contexts, c.contexts), append(out.codes, codes);
        append(tokens, c.tokens);
        out.grids.push_back(grid), out.positions.push_back({0, grid.count()});
    }
    Case& coded = out.coded;
    coded.count = tokens.size();
    if (tokens.empty()) return out;
    if (choose.one_in(4)) tokens = mutant_of(choose, tokens, tokens.size()), out.codes.clear();
    coded.chunk = choose.one_in(3) ? kChunk : 1 + coded.count / (1 + choose.below(20));
    out.last = static_cast<size_t>((coded.count + coded.chunk - 1) / coded.chunk);
    coded.model.tokens = Tokens::Codes, coded.model.predictor = Predictor::Base;
    coded.model.top = *std::max_element(out.contexts.begin(), out.contexts.end());
    if (choose.one_in(4)) coded.model.top = static_cast<int32_t>(choose.below(256));
    const Exact contexts(out.contexts), values(tokens);
    Arrays arrays;
    arrays.base = contexts.data();
    const EncodedRecord made = encode(coded.model, arrays, values.data(), coded.count, coded.chunk, 1);
    coded.side.assign(made.side.begin(), made.side.end()), coded.codes.assign(made.codes.begin(), made.codes.end());
    return out;
}

Record some_chunks(Choices& choose, Record all) {
    const size_t chunks = all.last;
    all.first = choose.below(static_cast<unsigned>(chunks));
    all.last = all.first + 1 + choose.below(static_cast<unsigned>(chunks - all.first));
    const Bytes& side = all.coded.side;
    const std::vector<uint32_t> sizes = elements<uint32_t>(part_of(side, 1, {side.size() - 4 * chunks, 4 * chunks}));
    Positions bytes{0, 0}, here{all.range().start(), all.range().values()};
    for (size_t i = 0; i < all.last; ++i) (i < all.first ? bytes.first : bytes.count) += sizes[i];
    const auto cut = [](Bytes& array, size_t size, Positions positions) { array = part_of(array, size, positions); };
    cut(all.coded.codes, 1, bytes), cut(all.guesses, 2, here), cut(all.contexts, 1, here), cut(all.codes, 2, here);
    uint64_t begin = 0;
    for (size_t i = 0; i < all.grids.size(); ++i) {
        const uint64_t end = begin + all.positions[i].count, first = std::clamp(here.first, begin, end);
        all.positions[i] = {first - begin, std::clamp(here.first + here.count, begin, end) - first};
        cut(all.grids[i].parent, all.grids[i].width, all.positions[i]);
        cut(all.grids[i].squares, all.grids[i].square_lattice ? 1 : 4, all.positions[i]);
        begin = end;
    }
    return all;
}

// Codes of two bytes, or nothing if they are refused. They go in place of the parent's codes where that is possible.
Bytes read(const Record& record, bool in_place, unsigned threads) {
    std::vector<std::unique_ptr<Exact>> blocks;
    const auto hold = [&](const Bytes& bytes) { return blocks.emplace_back(std::make_unique<Exact>(bytes)).get(); };
    std::vector<CodedPart> parts;
    for (size_t i = 0; i < record.grids.size(); ++i) {
        const Grid& grid = record.grids[i];
        const Exact *const parent = hold(grid.parent), *const squares = hold(grid.squares);
        const bool is_over = in_place && grid.parent_lattice && grid.width == 1;
        const Exact* const codes = is_over ? parent : hold(Bytes(record.positions[i].count, 0xa5));
        parts.push_back({&grid.lattice, known_of(grid, *parent, *squares), record.positions[i],
                         reinterpret_cast<int8_t*>(codes->data())});
    }
    const Exact side(record.coded.side), coded(record.coded.codes);
    std::vector<WideCodes> wide;
    const bool accepted = accepts([&] {
        wide = lattice_decode_codes(parts, record.coded.model, side.data(), record.coded.side.size(), coded.data(),
                                    record.coded.codes.size(), record.range(), threads);
    });
    std::vector<int16_t> out;
    for (size_t i = 0; accepted && i < parts.size(); ++i) {
        const size_t begin = out.size();
        out.insert(out.end(), parts[i].codes, parts[i].codes + parts[i].positions.count);
        for (const WideCodes& one : wide)
            if (one.part == i) std::copy(one.codes.begin(), one.codes.end(), &out[begin + one.start]);
    }
    return bytes_of_all(out);
}

// The same by way of the tokens of all positions.
Bytes read_by_tokens(const Record& record) {
    const size_t count = record.range().values();
    const Exact guesses(record.guesses), contexts(record.contexts), tokens(Bytes(count, 0xa5));
    const Exact side(record.coded.side), coded(record.coded.codes);
    Arrays arrays;
    arrays.base = contexts.data();
    auto* const codes = reinterpret_cast<int16_t*>(guesses.data());
    const bool accepted = accepts([&] {
        decode_chunks(record.coded.model, arrays, nullptr, side.data(), record.coded.side.size(), coded.data(),
                      record.coded.codes.size(), tokens.data(), record.range(), 1);
        lattice_decode(record.grids[0].lattice, tokens.data(), contexts.data(), nullptr, 0, {}, codes, {nullptr},
                       {0, count}, 1);  // without values, the lattice does not matter
    });
    return accepted ? Bytes(guesses.data(), guesses.data() + 2 * count) : Bytes();
}

void check_record(const Record& record) {
    const Bytes made = same_under_any_rounding([&](unsigned threads) {
        const Bytes codes = read(record, false, threads);
        expect(read(record, true, threads) == codes, "codes in place of the parent's differ");
        return codes;
    });
    expect(made == read_by_tokens(record), "codes differ from those by tokens");
    expect(record.codes.empty() || made == record.codes, "codes do not come back");
}

void check_records(Choices& choose) {
    const Record record = make_record(choose);
    if (record.coded.count == 0) return;
    check_record(record);
    check_record(some_chunks(choose, record));
    for (unsigned i = 0; i < 6; ++i) {
        Record mutant = record;
        mutant.codes.clear();
        if (choose.one_in(4)) mutate_known(choose, mutant);
        if (choose.one_in(2)) mutant = some_chunks(choose, mutant);
        Case& coded = mutant.coded;
        if (!choose.one_in(4)) mutate(choose, coded);
        coded.model = record.coded.model, coded.count = record.coded.count, coded.chunk = record.coded.chunk;
        if (choose.one_in(8)) coded.model.top = static_cast<int32_t>(choose.below(256));
        if (choose.one_in(4)) check_record(mutant);
        const Bytes made = read(mutant, choose.one_in(2), 1 + choose.below(3));
        expect(made == read_by_tokens(mutant), "a mutant's codes differ from those by tokens");
        ++(made.empty() ? tally.refused : tally.accepted);
    }
}

}  // namespace

void fuzz_lattice(Choices& choose) {
    make_any(choose);
    const Grid grid = make_grid(choose);
    check_tokens(choose, grid);
    if (!grid.lattice.powers) {
        check_nearest(choose, grid);
        check_points_stay(choose, grid);
    }
    check_records(choose);
}

}  // namespace shrinkpoint
