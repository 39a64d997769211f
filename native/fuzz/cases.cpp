#include "fuzz/cases.hpp"

#include "entropy/tokens.hpp"

namespace shrinkpoint {

bool lay_out(const Shapes& shapes, uint64_t count, Factors& out) {
    uint64_t start = 0, rows = 0, columns = 0;
    for (const auto& [r, c] : shapes) {
        if (r == 0 || c == 0 || r > count / c) return false;
        out.segments.push_back({start, r, c, rows, columns});
        start += r * c, rows += r, columns += c;
    }
    if (start != count) return false;
    out.centers.resize(shapes.size());
    out.rows.resize(rows);
    out.columns.resize(columns);
    return true;
}

namespace {

struct Kind {
    unsigned width, mantissa;
};
constexpr Kind kKinds[] = {{8, 0}, {16, 0}, {32, 0}, {64, 0}, {16, 7}, {16, 10}, {32, 23}, {64, 52}};

float any_float(Choices& choose) {
    const float special[] = {0.0f, -0.0f, 1.0f, -1e-3f, 0.9f, 0.999f, 1e-8f, 3e38f, 1e-45f,
                             std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN()};
    if (!choose.one_in(4)) return special[choose.below(sizeof special / sizeof *special)];
    const auto bits = static_cast<uint32_t>(choose.word());
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

void choose_level(Choices& choose, Model& model) {
    model.fine = choose.one_in(4) ? choose.below(model.mantissa + 1) : std::min(choose.below(5), model.mantissa);
    model.shift = choose.one_in(3) ? choose.below(model.mantissa - model.fine + 1) : 0;
    model.has_sign = !choose.one_in(3);
    const int32_t middle = ((1 << (model.width - model.mantissa - 2)) - 1) << std::min(model.fine, 8u);
    model.bias = choose.one_in(4) ? static_cast<int32_t>(choose.below(1u << 21)) - (1 << 20) : middle;
    model.bias = std::clamp(model.bias, 1 - (1 << 20), (1 << 20) - 1);
    model.companion = static_cast<Companion>(choose.below(3));
}

void choose_delta(Choices& choose, Model& model) {
    model.shift = choose.one_in(4) ? choose.below(model.width) : 0;
    const bool single = model.width == 32 && model.mantissa == 23;
    model.predictor = static_cast<Predictor>(choose.below(single ? 4 : 2));
    const unsigned exponents = model.width - 1 - model.mantissa;
    model.top = static_cast<int32_t>(choose.one_in(4) || exponents > 12 ? choose.below(1 << 12) : 1u << (exponents - 1));
    for (float& parameter : model.parameters) parameter = any_float(choose);
}

void choose_codes(Choices& choose, Model& model) {
    model.width = 8, model.mantissa = 0;
    model.predictor = static_cast<Predictor>(choose.below(2));
    model.top = static_cast<int32_t>(choose.one_in(2) ? 0 : choose.below(256));
}

enum class Flavour { Noise, Floats, Sparse, Constant, Count };

// Bit patterns of `kind`: noise, floats of similar size with a few others, mostly zeros, or all equal.
std::vector<uint64_t> patterns(Choices& choose, Kind kind, uint64_t count) {
    const auto flavour = static_cast<Flavour>(choose.below(static_cast<unsigned>(Flavour::Count)));
    const uint64_t constant = choose.word();
    const unsigned spread = 1 + choose.below(12), odd = 8 << choose.below(8);
    const unsigned exponents = kind.width - 1 - kind.mantissa;
    std::vector<uint64_t> out;
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t noise = choose.word();
        const uint64_t exponent = (uint64_t{1} << (exponents - 1)) - 1 - static_cast<uint64_t>(noise >> 56) % spread;
        const uint64_t low = kind.mantissa > 0 ? noise & ((uint64_t{1} << kind.mantissa) - 1) : 0;
        const uint64_t sized = exponent << kind.mantissa | low | (noise >> 55 & 1) << (kind.width - 1);
        uint64_t one = flavour == Flavour::Constant ? constant : flavour == Flavour::Noise ? noise : sized;
        if (flavour == Flavour::Sparse && noise >> 40 & 7) one = 0;
        if (flavour != Flavour::Constant && (noise >> 32) % odd == 0) one = choose.word();
        out.push_back(one);
    }
    return out;
}

Bytes packed(const std::vector<uint64_t>& patterns, unsigned width) {
    Bytes out(patterns.size() * (width / 8));
    for (size_t i = 0; i < patterns.size(); ++i) std::memcpy(out.data() + i * (width / 8), &patterns[i], width / 8);
    return out;
}

Bytes array(Choices& choose, Kind kind, uint64_t count) { return packed(patterns(choose, kind, count), kind.width); }

Shapes make_shapes(Choices& choose, uint64_t count) {
    Shapes out;
    while (count > 0) {
        const uint64_t part = choose.one_in(3) ? count : 1 + choose.word() % count;
        const uint64_t rows = 1 + choose.word() % part, columns = choose.one_in(2) ? part / rows : 1;
        const uint64_t r = choose.one_in(4) ? 1 : rows, c = std::max<uint64_t>(1, std::min(columns, part / r));
        out.emplace_back(r, c);
        count -= r * c;
    }
    return out;
}

size_t make_chunk(Choices& choose, uint64_t count) {
    switch (choose.below(4)) {
        case 0: return kChunk;
        case 1: return 1 + static_cast<size_t>(choose.word() % count);
        case 2: return kTile * (1 + choose.below(4)) + choose.below(3) - 1;
        default: return count < 64 ? 1 + choose.below(8) : 64 + choose.below(2000);
    }
}

uint32_t extreme(Choices& choose, uint32_t now) {
    switch (choose.below(6)) {
        case 0: return 0;
        case 1: return 0xffffffffu;
        case 2: return 1u << choose.below(32);
        case 3: return now + choose.below(17) - 8;
        case 4: return now ^ 1u << choose.below(32);
        default: return static_cast<uint32_t>(choose.word());
    }
}

void set_word(Choices& choose, Bytes& bytes, size_t at) {
    uint32_t word;
    if (at + 4 > bytes.size()) return;
    std::memcpy(&word, bytes.data() + at, 4);
    word = extreme(choose, word);
    std::memcpy(bytes.data() + at, &word, 4);
}

size_t place(Choices& choose, size_t size) { return size == 0 ? 0 : static_cast<size_t>(choose.word() % size); }

uint64_t chunks_of(const Case& c) { return (c.count + c.chunk - 1) / c.chunk; }

// Moves the border between two chunks, so that their sizes still add up.
void move_border(Choices& choose, Case& c) {
    const uint64_t chunks = chunks_of(c);
    if (chunks < 2 || c.side.size() < 4 * chunks) return;
    uint8_t* at = c.side.data() + c.side.size() - 4 * chunks + 4 * place(choose, chunks - 1);
    uint32_t two[2];
    std::memcpy(two, at, 8);
    const uint32_t most = choose.one_in(2) ? 16 : std::max(1u, two[1]), moved = std::min(two[1], choose.below(most));
    two[0] += moved, two[1] -= moved;
    if (choose.one_in(2)) std::swap(two[0], two[1]);
    std::memcpy(at, two, 8);
}

// Replaces the codes by others of any length, with a last size that fits.
void resize_last(Choices& choose, Case& c) {
    if (c.side.size() < 4) return;
    uint32_t last;
    std::memcpy(&last, c.side.data() + c.side.size() - 4, 4);
    if (choose.one_in(2)) {
        const uint32_t less = std::min<uint32_t>(last, 1 + choose.below(choose.one_in(2) ? 24 : 4096));
        if (less > c.codes.size()) return;
        last -= less;
        c.codes.resize(c.codes.size() - less);
    } else {
        const Bytes more = choose.bytes(1 + choose.below(choose.one_in(2) ? 24 : 4096));
        last += static_cast<uint32_t>(more.size());
        c.codes.insert(c.codes.end(), more.begin(), more.end());
    }
    std::memcpy(c.side.data() + c.side.size() - 4, &last, 4);
}

// Replaces the tables by others that are valid: symbols then are arbitrary and ask for any number of extra bits.
void replace_tables(Choices& choose, Case& c) {
    uint32_t size;
    if (c.side.size() < 4) return;
    std::memcpy(&size, c.side.data(), 4);
    if (size > c.side.size() - 4) return;
    Arrays arrays;  // only which there are
    arrays.moment1 = c.moment1.empty() ? nullptr : reinterpret_cast<const float*>(c.moment1.data());
    arrays.moment2 = c.moment2.empty() ? nullptr : reinterpret_cast<const float*>(c.moment2.data());
    const Bytes other = write_tables(make_tables(choose, context_count(c.model, arrays)));
    const auto written = static_cast<uint32_t>(other.size());
    c.side.erase(c.side.begin() + 4, c.side.begin() + 4 + static_cast<ptrdiff_t>(size));
    c.side.insert(c.side.begin() + 4, other.begin(), other.end());
    std::memcpy(c.side.data(), &written, 4);
}

// Changes the word before a chunk's symbol stream.
void set_stream_size(Choices& choose, Case& c) {
    const uint64_t chunks = chunks_of(c);
    if (c.side.size() < 4 * chunks) return;
    const uint8_t* sizes = c.side.data() + c.side.size() - 4 * chunks;
    uint64_t start = 0;
    for (uint64_t i = place(choose, chunks); i > 0; --i) {
        uint32_t size;
        std::memcpy(&size, sizes + 4 * (i - 1), 4);
        start += size;
    }
    set_word(choose, c.codes, start);
}

void mutate_model(Choices& choose, Model& model) {
    const auto small = [&] { return choose.one_in(2) ? choose.below(70) : choose.below(1 << 12); };
    switch (choose.below(10)) {
        case 0: model.fine = small(); break;
        case 1: model.shift = small(); break;
        case 2: model.top = static_cast<int32_t>(small()); break;
        case 3: model.bias = static_cast<int32_t>(choose.word() % ((1 << 21) - 1)) - (1 << 20) + 1; break;
        case 4: model.has_sign = !model.has_sign; break;
        case 5: model.tokens = static_cast<Tokens>(choose.below(4)); break;
        case 6: model.predictor = static_cast<Predictor>(choose.below(4)); break;
        case 7: model.companion = static_cast<Companion>(choose.below(3)); break;
        case 8: model.parameters[choose.below(4)] = any_float(choose); break;
        default: {
            const Kind kind = kKinds[choose.below(sizeof kKinds / sizeof *kKinds)];
            model.width = kind.width, model.mantissa = kind.mantissa;
        }
    }
}

void mutate_layout(Choices& choose, Case& c) {
    switch (choose.below(4)) {
        case 0:
            c.count = 1 + choose.word() % 4000;
            if (c.has_factors && choose.one_in(2)) c.shapes = make_shapes(choose, c.count);
            break;
        case 1: c.chunk = choose.one_in(2) ? make_chunk(choose, c.count) : 1 + choose.below(1 << 16); break;
        case 2: c.shapes = make_shapes(choose, c.count); break;
        default: c.has_factors = !c.has_factors;
    }
    if (c.has_factors && c.shapes.empty()) c.shapes = make_shapes(choose, c.count);
}

void mutate_arrays(Choices& choose, Case& c) {
    Bytes* const all[] = {&c.base, &c.moment1, &c.moment2, &c.moment1_base, &c.hint};
    Bytes& one = *all[choose.below(5)];
    if (choose.one_in(4))
        one.clear();
    else
        one = choose.bytes(8 + choose.below(4000));
}

}  // namespace

Model make_model(Choices& choose, bool factors) {
    Model model;
    const Kind kind = kKinds[choose.below(sizeof kKinds / sizeof *kKinds)];
    model.width = kind.width, model.mantissa = kind.mantissa;
    model.tokens = static_cast<Tokens>(choose.one_in(4) ? 2 + choose.below(2) : choose.below(2));
    if (model.tokens == Tokens::Codes) choose_codes(choose, model);
    if (model.tokens == Tokens::Level && (model.mantissa == 0 || (factors && model.width == 64)))
        model.tokens = Tokens::Delta;
    if (model.tokens == Tokens::Level) choose_level(choose, model);
    if (model.tokens == Tokens::Delta) choose_delta(choose, model);
    return model;
}

size_t make_count(Choices& choose) {
    if (choose.one_in(150)) return 60000 + choose.below(60000) + choose.below(40000);
    const size_t count = choose.below(choose.one_in(3) ? 70 : 4500);
    return choose.one_in(3) ? count / 64 * 64 : count;
}

Bytes make_floats(Choices& choose, size_t count) {
    constexpr Kind kFloat{32, 23};
    if (!choose.one_in(2)) return array(choose, kFloat, count);
    const float scale = std::ldexp(1.0f, static_cast<int>(choose.below(270)) - 145), shift = any_float(choose);
    const unsigned points = choose.one_in(2) ? 3 : 1 + choose.below(5000);
    const unsigned odd = choose.one_in(2) ? 0 : 1 + choose.below(500);
    const bool moved = choose.one_in(4);
    std::vector<float> out(count);
    for (float& one : out) {
        const auto at = static_cast<float>(choose.below(2 * points + 1)) - static_cast<float>(points);
        one = odd != 0 && choose.one_in(odd) ? any_float(choose) : at * scale + (moved ? shift : 0.0f);
    }
    return bytes_of_all(out);
}

ContextTables make_tables(Choices& choose, unsigned contexts) {
    ContextTables out;
    const unsigned count = choose.one_in(3) ? 1 : 1 + choose.below(kMaxTables);
    for (unsigned t = 0; t < count; ++t) {
        Histogram histogram{};
        const unsigned first = choose.one_in(2) ? 0 : choose.below(256);
        const unsigned end = choose.one_in(2) ? 256 : first + 1 + choose.below(256 - first);
        const unsigned steep = choose.below(24), gaps = 1 + choose.below(4);
        for (unsigned s = first; s < end; ++s)
            if (choose.one_in(gaps)) histogram[s] = 1 + choose.word() % (uint64_t{1} << steep);
        histogram[255] += end == 256;
        histogram[first] += 1;
        out.frequencies.push_back(normalise(histogram));
    }
    uint8_t last = 0;
    for (unsigned c = 0; c < contexts; ++c) {
        if (choose.one_in(4)) last = static_cast<uint8_t>(choose.below(count));
        out.map.push_back(last);
    }
    return out;
}

Case make_case(Choices& choose, Bytes& values) {
    Case c;
    const bool factors = choose.one_in(3);
    c.model = make_model(choose, factors);
    c.has_factors = factors && c.model.tokens == Tokens::Level && c.model.width <= 32 && c.model.fine < c.model.mantissa;
    c.count = choose.one_in(48) ? 3000 + choose.word() % 80000 : 1 + choose.word() % (choose.one_in(3) ? 40 : 3000);
    c.chunk = make_chunk(choose, c.count);
    if (c.has_factors) c.shapes = make_shapes(choose, c.count);
    const Model& model = c.model;
    const Kind kind{model.width, model.mantissa}, single{32, 23};
    const std::vector<uint64_t> base = patterns(choose, kind, c.count);
    std::vector<uint64_t> wanted = patterns(choose, kind, c.count);
    if (choose.one_in(2))  // near the base
        for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = base[i] + (wanted[i] & 63) - 32;
    uint64_t kept = ~uint64_t{0};
    if (model.tokens != Tokens::Planes) kept <<= model.shift;
    if (model.tokens == Tokens::Level && !model.has_sign) kept &= (uint64_t{1} << (model.width - 1)) - 1;
    for (uint64_t& one : wanted) one &= kept;
    values = packed(wanted, model.width);
    const bool needs_base = model.predictor != Predictor::None || model.companion == Companion::Base;
    const bool steps = model.predictor == Predictor::Adam || model.predictor == Predictor::Square;
    if (needs_base || choose.one_in(8)) c.base = packed(base, model.width);
    if (steps || model.companion == Companion::Moment1 || choose.one_in(3)) {
        c.moment1 = array(choose, single, c.count);
        if (steps || !choose.one_in(4)) c.moment2 = array(choose, single, c.count);
    }
    if (model.predictor == Predictor::Square || choose.one_in(8)) c.moment1_base = array(choose, single, c.count);
    if (choose.one_in(4)) c.hint = choose.bytes(c.count);
    return c;
}

void mutate(Choices& choose, Bytes& bytes, const Bytes& other) {
    const size_t at = place(choose, bytes.size());
    const auto here = bytes.begin() + static_cast<ptrdiff_t>(at);
    switch (choose.below(9)) {
        case 0:
        case 1:
            if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1 << choose.below(8));
            break;
        case 2:
            if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(choose.one_in(2) ? choose.below(256) : 255 * choose.below(2));
            break;
        case 3: bytes.resize(choose.one_in(2) ? at : bytes.size() - std::min<size_t>(bytes.size(), 1 + choose.below(16))); break;
        case 4: {
            const Bytes more = choose.bytes(1 + choose.below(choose.one_in(4) ? 4096 : 16));
            bytes.insert(choose.one_in(2) ? bytes.end() : here, more.begin(), more.end());
            break;
        }
        case 5: {  // splice
            const size_t from = place(choose, other.size());
            const size_t length = std::min({other.size() - from, bytes.size() - at, size_t{1} + choose.below(64)});
            std::copy_n(other.begin() + static_cast<ptrdiff_t>(from), length, here);
            break;
        }
        case 6: {
            const size_t length = std::min(bytes.size() - at, size_t{1} + choose.below(choose.one_in(2) ? 4 : 64));
            bytes.erase(here, here + static_cast<ptrdiff_t>(length));
            break;
        }
        case 7: set_word(choose, bytes, choose.one_in(2) ? at / 4 * 4 : at); break;
        default: {
            const size_t length = std::min(bytes.size() - at, size_t{1} + choose.below(64));
            std::fill_n(here, length, static_cast<uint8_t>(choose.one_in(2) ? 0 : 255));
        }
    }
}

Bytes mutant_of(Choices& choose, const Bytes& message, size_t size) {
    Bytes out = choose.one_in(8) ? choose.bytes(size) : message;
    for (unsigned n = choose.below(4); n > 0; --n) mutate(choose, out, message);
    if (out.size() < size) {
        const Bytes more = choose.bytes(size - out.size());
        out.insert(out.end(), more.begin(), more.end());
    }
    out.resize(size);
    return out;
}

void mutate(Choices& choose, Case& c) {
    switch (choose.below(14)) {
        case 0:
        case 1: return mutate(choose, c.side, c.codes);
        case 2:
        case 3:
        case 4: return mutate(choose, c.codes, c.side);
        case 5: return move_border(choose, c);
        case 6:
        case 7: return resize_last(choose, c);
        case 8: return replace_tables(choose, c);
        case 9: return set_stream_size(choose, c);
        case 10:
        case 11: return mutate_model(choose, c.model);
        case 12: return mutate_layout(choose, c);
        default: return mutate_arrays(choose, c);
    }
}

}  // namespace shrinkpoint
