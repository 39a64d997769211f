// Fuzzes messages of grids, levels, small floats and rotations: round trips, and random bytes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fuzz/checks.hpp"
#include "wire/blocks.hpp"
#include "wire/uniform.hpp"

namespace shrinkpoint {

namespace {

constexpr float kNearInfinity = 2e37f;  // sums of some values beyond it may not be finite

bool finite(const float* values, size_t count) {
    return std::all_of(values, values + count, [](float x) { return std::isfinite(x); });
}

float largest(const float* values, size_t count) {
    float most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, std::fabs(values[i]));
    return most;
}

// Maps every nan to one: which of two a sum becomes is the compiler's choice.
std::vector<float> with_one_nan(const Bytes& bytes) {
    std::vector<float> out = elements<float>(bytes);
    for (float& one : out)
        if (std::isnan(one)) one = 0x1p127f * 1.5f;
    return out;
}

float brief_at(const Bytes& wire, size_t place) {
    const uint32_t bits = static_cast<uint32_t>(wire[place]) << 16 | static_cast<uint32_t>(wire[place + 1]) << 24;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Encodes values and decodes messages, with every buffer of exactly its size and at any address.
template <typename How, typename Encode>
Bytes encoded(Choices& choose, const How& layout, const Bytes& values, Encode encode) {
    const Exact from(values);
    const size_t shift = choose.below(8);
    return same_everywhere([&](unsigned threads) {
        const Unaligned wire(shift, Bytes(layout.bytes(), 0xa5));
        encode(layout, from.floats(), wire.data(), threads);
        return Bytes(wire.data(), wire.data() + layout.bytes());
    });
}

template <typename How, typename Decode>
Bytes decoded_once(Choices& choose, const How& layout, const Bytes& wire, Decode decode, unsigned threads) {
    const Unaligned from(choose.below(8), wire);
    const Exact values(Bytes(4 * layout.count, 0xa5));
    decode(layout, from.data(), values.floats(), threads);
    return Bytes(values.data(), values.data() + 4 * layout.count);
}

template <typename How, typename Decode>
Bytes decoded(Choices& choose, const How& layout, const Bytes& wire, Decode decode) {
    return same_everywhere([&](unsigned threads) { return decoded_once(choose, layout, wire, decode, threads); });
}

// Decodes random bytes as messages of `how`, or of a variant that `change` makes.
template <typename How, typename Decode, typename Change>
void decode_mutants(Choices& choose, const How& layout, const Bytes& wire, Decode decode, Change change) {
    for (unsigned i = 0; i < 6; ++i) {
        How other = layout;
        if (choose.one_in(3)) change(other);
        const Bytes mutant = mutant_of(choose, wire, other.bytes());
        const Bytes values = decoded_once(choose, other, mutant, decode, 1);
        if (!choose.one_in(3)) continue;
        const Simd before = simd();
        limit_simd(static_cast<Simd>(choose.below(3)));
        const Bytes again = decoded_once(choose, other, mutant, decode, 3);
        limit_simd(before);
        expect(with_one_nan(again) == with_one_nan(values), "instruction sets differ");
    }
}

// ---- uniform grids

size_t make_run(Choices& choose, size_t count) {
    switch (choose.below(6)) {
        case 0: return std::max<size_t>(1, count);
        case 1:
        case 2: return 64;
        case 3: return 1 + choose.below(8);
        case 4: return 1 + choose.below(200);
        default: return 1 + choose.below(choose.one_in(4) ? 65535 : 3000);
    }
}

UniformWire make_uniform(Choices& choose, size_t count) {
    return {count, make_run(choose, count), 1 + choose.below(8), !choose.one_in(3), choose.one_in(3),
            static_cast<uint32_t>(choose.word())};
}

void change(Choices& choose, UniformWire& layout) {
    switch (choose.below(5)) {
        case 0: layout.count = choose.one_in(2) ? layout.count + 1 : make_count(choose); break;
        case 1: layout.size = make_run(choose, layout.count); break;
        case 2: layout.bits = 1 + choose.below(8); break;
        case 3: layout.brief = !layout.brief; break;
        default: layout.dithered = !layout.dithered;
    }
}

float step_of(const UniformWire& layout, const Bytes& wire, size_t run) {
    if (layout.brief) return brief_at(wire, 2 * (layout.runs() + run));
    float out;
    std::memcpy(&out, wire.data() + 4 * (layout.runs() + run), 4);
    return out;
}

void check_run(const UniformWire& layout, const float* wanted, const float* found, size_t count, float step) {
    const float levels = static_cast<float>((1u << layout.bits) - 1), most = largest(wanted, count);
    const bool lost = std::isnan(found[0]);
    for (size_t i = 0; i < count; ++i) expect(std::isnan(found[i]) == lost, "a part of a run is lost");
    expect(finite(wanted, count) || lost, "a run holds what is not finite, and is not lost");
    expect(!lost || !finite(wanted, count) || most > kNearInfinity, "a run is lost");
    if (lost) return;
    expect(finite(found, count) && step >= 0, "a grid that is not finite");
    const double allowed = 0.501 * step + most * 0x1p-21 + levels * 0x1p-119;
    for (size_t i = 0; i < count; ++i) {
        const double off = std::abs(static_cast<double>(wanted[i]) - found[i]);
        expect(off <= allowed, "further off than half a step");
    }
}

// ---- levels of a normal distribution

struct NormalCase : NormalWire {
    float levels[8];
};

void set_levels(Choices& choose, NormalCase& layout, bool tame) {
    const Bytes any = make_floats(choose, 8);
    std::memcpy(layout.levels, any.data(), sizeof layout.levels);
    float last = 0;
    for (float& level : layout.levels)
        if (tame) level = last += static_cast<float>(1 + choose.below(100)) / 100;
}

size_t make_group(Choices& choose) { return choose.one_in(3) ? 64 : kLeastGroup << choose.below(9); }

void check_group(const NormalCase& layout, const float* wanted, const float* found, size_t count, float scale) {
    const bool lost = std::isnan(scale), fine = finite(wanted, count);
    const float most = largest(wanted, count);
    expect(fine || lost, "a group holds what is not finite, and is not lost");
    expect(!lost || !fine || most > kNearInfinity, "a group is lost");
    for (size_t i = 0; i < count; ++i) {
        expect(std::isnan(found[i]) == lost, "a part of a group is lost");
        if (lost || scale == 0) continue;
        const double size = std::fabs(static_cast<double>(wanted[i])), off = std::abs(size - std::fabs(found[i]));
        expect(std::signbit(found[i]) == (wanted[i] < 0), "a sign is wrong");
        for (size_t k = 0; k < size_t{1} << (layout.bits - 1); ++k) {
            const double other = std::abs(size - static_cast<double>(layout.levels[k]) * scale);
            expect(most > kNearInfinity || off <= other + 1e-5 * (size + scale), "not the nearest level");
        }
    }
}

void encode_normal(const NormalCase& layout, const float* values, uint8_t* wire, unsigned threads) {
    const Bytes levels = bytes_of_all(std::vector<float>(layout.levels, layout.levels + (1 << (layout.bits - 1))));
    const Exact centers(levels);
    NormalWire told = layout;
    told.centers = centers.floats();
    normal_encode(told, values, wire, threads);
}

void decode_normal(const NormalCase& layout, const uint8_t* wire, float* values, unsigned threads) {
    const Bytes levels = bytes_of_all(std::vector<float>(layout.levels, layout.levels + (1 << (layout.bits - 1))));
    const Exact centers(levels);
    NormalWire told = layout;
    told.centers = centers.floats();
    normal_decode(told, wire, values, threads);
}

// ---- blocks of small floats

void check_block(const BlockWire& layout, const float* wanted, const float* found, size_t count, unsigned exponent) {
    const bool fine = finite(wanted, count);
    expect(fine == (exponent != 255), "a block is lost, or one that should be is not");
    const int octave = static_cast<int>(exponent) - 125 - static_cast<int>(layout.bits);
    const float step = exponent == 0 || !fine ? 0.0f : std::ldexp(1.0f, octave);
    const float most = step * static_cast<float>((1u << (layout.bits - 1)) - 1);
    for (size_t i = 0; i < count; ++i) {
        expect(std::isnan(found[i]) != fine, "a part of a block is lost");
        if (!fine) continue;
        expect(std::fabs(found[i]) <= most, "beyond the largest mantissa");
        const double off = std::abs(static_cast<double>(wanted[i]) - found[i]);
        const bool cut = std::fabs(found[i]) == most && std::fabs(wanted[i]) >= most;
        expect(exponent == 0 || cut || off <= step / 2.0, "further off than half a step");
    }
}

// ---- rotations

struct Turn {
    Rotation layout;
    bool flagged;
    Bytes signs;

    size_t padded_size() const { return layout.blocks() * layout.block; }
};

Bytes turned(const Turn& c, const Bytes& values) {
    const Exact from(values), signs(c.signs);
    Rotation layout = c.layout;
    layout.signs = signs.floats();
    return same_everywhere([&](unsigned threads) {
        const Exact out(Bytes(4 * c.padded_size(), 0xa5)), flags(Bytes(c.flagged ? layout.blocks() : 0, 0xa5));
        rotate(layout, from.floats(), out.floats(), c.flagged ? flags.data() : nullptr, threads);
        Bytes all(out.data(), out.data() + 4 * c.padded_size());
        if (c.flagged) all.insert(all.end(), flags.data(), flags.data() + layout.blocks());
        return all;
    });
}

// `message` is turned values, then flags.
Bytes turned_back(const Turn& c, const Bytes& message, unsigned threads) {
    const auto border = message.begin() + static_cast<ptrdiff_t>(4 * c.padded_size());
    const Exact from(Bytes(message.begin(), border)), flags(Bytes(border, message.end())), signs(c.signs);
    const Exact out(Bytes(4 * c.layout.count, 0xa5));
    Rotation layout = c.layout;
    layout.signs = signs.floats();
    rotate_back(layout, from.floats(), c.flagged ? flags.data() : nullptr, out.floats(), threads);
    return Bytes(out.data(), out.data() + 4 * layout.count);
}

void check_turns(const Turn& c, const Bytes& values, const Bytes& message, const Bytes& back) {
    const std::vector<float> wanted = elements<float>(values), found = elements<float>(back);
    for (size_t start = 0; start < c.layout.count; start += c.layout.block) {
        const size_t count = std::min(c.layout.block, c.layout.count - start);
        const bool stays = c.flagged && message[4 * c.padded_size() + start / c.layout.block] == 0;
        const float most = largest(&wanted[start], count);
        if (stays) {
            expect(std::memcmp(&wanted[start], &found[start], 4 * count) == 0, "a block changes that is not turned");
            continue;
        }
        const bool fine = finite(&wanted[start], count);
        for (size_t i = start; i < start + count; ++i) {
            expect(fine || !std::isfinite(found[i]), "what is not finite does not take its block along");
            if (!fine || most > kNearInfinity / 256) continue;
            const double off = std::abs(static_cast<double>(wanted[i]) - found[i]);
            expect(off <= static_cast<double>(c.layout.block) * (most * 0x1p-20 + 0x1p-140), "a block does not come back");
        }
    }
}

Turn make_turn(Choices& choose, size_t count) {
    Turn out{{count, size_t{16} << 2 * choose.below(3), nullptr, 0}, choose.one_in(2), {}};
    out.layout.limit = static_cast<float>(choose.below(1000)) / 100 / static_cast<float>(out.layout.block);
    std::vector<float> signs(out.layout.block);
    for (float& sign : signs) sign = choose.one_in(2) ? 1.0f : -1.0f;
    out.signs = bytes_of_all(signs);
    return out;
}

}  // namespace

void fuzz_uniform(Choices& choose) {
    const size_t count = make_count(choose);
    const UniformWire layout = make_uniform(choose, count);
    const Bytes values = make_floats(choose, count), wire = encoded(choose, layout, values, uniform_encode);
    const Bytes back = decoded(choose, layout, wire, uniform_decode);
    const std::vector<float> wanted = elements<float>(values), found = elements<float>(back);
    for (size_t run = 0; run < layout.runs(); ++run) {
        const size_t start = run * layout.size, here = std::min(layout.size, count - start);
        check_run(layout, &wanted[start], &found[start], here, step_of(layout, wire, run));
    }
    decode_mutants(choose, layout, wire, uniform_decode, [&](UniformWire& other) { change(choose, other); });
}

void fuzz_planes(Choices& choose) {
    const size_t count = make_count(choose), shift = choose.below(8);
    const unsigned bits = 1 + choose.below(8), mask = (1u << bits) - 1;
    Bytes codes = choose.bytes(count);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(code & mask);
    const Exact from(codes);
    const size_t size = wire_plane_bytes(count, bits);
    const auto unpacked = [&](const Bytes& planes) {
        return same_everywhere([&](unsigned) {
            const Unaligned data(shift, planes);
            const Exact out(Bytes(count, 0xa5));
            unpack_planes(data.data(), count, bits, out.data());
            return Bytes(out.data(), out.data() + count);
        });
    };
    const Bytes planes = same_everywhere([&](unsigned) {
        const Unaligned out(shift, Bytes(size, 0xa5));
        pack_planes(from.data(), count, bits, out.data());
        return Bytes(out.data(), out.data() + size);
    });
    expect(unpacked(planes) == codes, "codes do not come back from planes");
    for (const uint8_t code : unpacked(mutant_of(choose, planes, size)))
        expect(code <= mask, "a code of too many bits");
}

void fuzz_normal(Choices& choose) {
    const bool tame = !choose.one_in(4);
    NormalCase layout{{make_count(choose), make_group(choose), 1 + choose.below(4), nullptr}, {}};
    set_levels(choose, layout, tame);
    const Bytes values = make_floats(choose, layout.count), wire = encoded(choose, layout, values, encode_normal);
    const auto change = [&](NormalCase& other) {
        if (choose.one_in(2)) other.count = make_count(choose);
        if (choose.one_in(2)) other.group = make_group(choose);
        if (choose.one_in(2)) other.bits = 1 + choose.below(4);
        if (choose.one_in(2)) set_levels(choose, other, false);
    };
    decode_mutants(choose, layout, wire, decode_normal, change);
    if (!tame) return;
    const Bytes back = decoded(choose, layout, wire, decode_normal);
    const std::vector<float> wanted = elements<float>(values), found = elements<float>(back);
    for (size_t start = 0; start < layout.count; start += layout.group)
        check_group(layout, &wanted[start], &found[start], std::min(layout.group, layout.count - start),
                    brief_at(wire, 2 * (start / layout.group)));
}

void fuzz_blockfloat(Choices& choose) {
    const BlockWire layout{make_count(choose), make_group(choose), 2 + choose.below(7)};
    const Bytes values = make_floats(choose, layout.count), wire = encoded(choose, layout, values, blockfloat_encode);
    const Bytes back = decoded(choose, layout, wire, blockfloat_decode);
    const std::vector<float> wanted = elements<float>(values), found = elements<float>(back);
    bool stays = true;  // the least exponents may become 0 when they are sent again
    for (size_t start = 0; start < layout.count; start += layout.block) {
        const uint8_t exponent = wire[start / layout.block];
        check_block(layout, &wanted[start], &found[start], std::min(layout.block, layout.count - start), exponent);
        stays &= exponent == 0 || exponent > 16;
    }
    expect(!stays || encoded(choose, layout, back, blockfloat_encode) == wire, "what is on a grid moves");
    decode_mutants(choose, layout, wire, blockfloat_decode, [&](BlockWire& other) {
        if (choose.one_in(2)) other.count = make_count(choose);
        if (choose.one_in(2)) other.block = make_group(choose);
        other.bits = 2 + choose.below(7);
    });
}

void fuzz_rotation(Choices& choose) {
    const size_t count = make_count(choose);
    const Turn c = make_turn(choose, count);
    const Bytes values = make_floats(choose, count), message = turned(c, values);
    const Bytes back = same_everywhere([&](unsigned threads) { return turned_back(c, message, threads); });
    check_turns(c, values, message, back);
    for (unsigned i = 0; i < 4; ++i) {
        Turn other = c;
        if (choose.one_in(3)) other = make_turn(choose, make_count(choose));
        const Bytes mutant = mutant_of(choose, message, 4 * other.padded_size() + (other.flagged ? other.layout.blocks() : 0));
        same_everywhere([&](unsigned threads) { return turned_back(other, mutant, threads); });
    }
}

}  // namespace shrinkpoint
