// Bindings of levels, blocks of small floats and rotations, for comm/compressors/quantizers.py and hadamard.py.
#include "bindings/python.hpp"
#include "wire/blocks.hpp"

using namespace nanobind::literals;

namespace shrinkpoint {

namespace {

// Checks that a buffer has `count` floats.
float* floats(const Bytes& bytes, size_t count, const char* name) {
    if (bytes.size() != 4 * count) throw nb::value_error((std::string(name) + ": wrong number of bytes").c_str());
    return reinterpret_cast<float*>(bytes.checked(4 * count, 4, name));
}

size_t width_of(bool bfloat16) { return bfloat16 ? 2 : 4; }

// Checks that a buffer has `count` values.
uint8_t* checked_values(const Bytes& bytes, size_t count, bool bfloat16) {
    const size_t width = width_of(bfloat16);
    if (bytes.size() != width * count) throw nb::value_error("values: wrong number of bytes");
    return bytes.checked(width * count, width, "values");
}

WireSource source_of(const Bytes& bytes, size_t count, bool bfloat16) {
    return {checked_values(bytes, count, bfloat16), bfloat16};
}

WireTarget target_of(const Bytes& bytes, size_t count, bool bfloat16) {
    return {checked_values(bytes, count, bfloat16), bfloat16};
}

// Checks that a message has `size` bytes.
uint8_t* message(const Bytes& bytes, size_t size) {
    if (bytes.size() != size) throw nb::value_error("wire: wrong number of bytes");
    return bytes.data();
}

NormalWire normal_of(const Bytes& values, bool bfloat16, const Bytes& centers, size_t group, unsigned bits) {
    if (bits < 1 || bits > 4 || !is_group(group)) throw nb::value_error("bits, group: out of range");
    return {values.size() / width_of(bfloat16), group, bits, floats(centers, size_t{1} << (bits - 1), "centers")};
}

BlockWire block_of(const Bytes& values, bool bfloat16, size_t block, unsigned bits) {
    if (bits < 2 || bits > 8 || !is_group(block)) throw nb::value_error("bits, block: out of range");
    return {values.size() / width_of(bfloat16), block, bits};
}

Rotation rotation_of(const Bytes& values, bool bfloat16, const Bytes& signs, float limit) {
    const size_t block = signs.size() / 4;
    if (block != 16 && block != 64 && block != 256) throw nb::value_error("signs: expected 16, 64 or 256");
    return {values.size() / width_of(bfloat16), block, floats(signs, block, "signs"), limit};
}

// Returns the flags, a byte for each block, or null if they were not given.
uint8_t* flags_of(const Bytes& flags, nb::handle given, const Rotation& layout) {
    if (!given.is_none() && flags.size() != layout.blocks()) throw nb::value_error("flags: wrong number of bytes");
    return given.is_none() ? nullptr : flags.data();
}

}  // namespace

void bind_wire_blocks(nb::module_& m) {
    m.def(
        "normal_encode",
        [](Input values, Input centers, Output wire, size_t group, unsigned bits, bool bfloat16,
           unsigned threads) {
            const Bytes from(values), levels(centers), to(wire, PyBUF_WRITABLE);
            const NormalWire layout = normal_of(from, bfloat16, levels, group, bits);
            const WireSource first = source_of(from, layout.count, bfloat16);
            uint8_t* out = message(to, layout.bytes());
            nb::gil_scoped_release release;
            normal_encode(layout, first, out, threads);
        },
        "values"_a, "centers"_a, "wire"_a, nb::kw_only(), "group"_a, "bits"_a, "bfloat16"_a = false, "threads"_a = 1);
    m.def(
        "normal_decode",
        [](Input wire, Input centers, Output values, size_t group, unsigned bits, bool bfloat16,
           unsigned threads) {
            const Bytes from(wire), levels(centers), to(values, PyBUF_WRITABLE);
            const NormalWire layout = normal_of(to, bfloat16, levels, group, bits);
            const WireTarget out = target_of(to, layout.count, bfloat16);
            const uint8_t* first = message(from, layout.bytes());
            nb::gil_scoped_release release;
            normal_decode(layout, first, out, threads);
        },
        "wire"_a, "centers"_a, "values"_a, nb::kw_only(), "group"_a, "bits"_a, "bfloat16"_a = false, "threads"_a = 1);
    m.def(
        "blockfloat_encode",
        [](Input values, Output wire, size_t block, unsigned bits, bool bfloat16, unsigned threads) {
            const Bytes from(values), to(wire, PyBUF_WRITABLE);
            const BlockWire layout = block_of(from, bfloat16, block, bits);
            const WireSource first = source_of(from, layout.count, bfloat16);
            uint8_t* out = message(to, layout.bytes());
            nb::gil_scoped_release release;
            blockfloat_encode(layout, first, out, threads);
        },
        "values"_a, "wire"_a, nb::kw_only(), "block"_a, "bits"_a, "bfloat16"_a = false, "threads"_a = 1);
    m.def(
        "blockfloat_decode",
        [](Input wire, Output values, size_t block, unsigned bits, bool bfloat16, unsigned threads) {
            const Bytes from(wire), to(values, PyBUF_WRITABLE);
            const BlockWire layout = block_of(to, bfloat16, block, bits);
            const WireTarget out = target_of(to, layout.count, bfloat16);
            const uint8_t* first = message(from, layout.bytes());
            nb::gil_scoped_release release;
            blockfloat_decode(layout, first, out, threads);
        },
        "wire"_a, "values"_a, nb::kw_only(), "block"_a, "bits"_a, "bfloat16"_a = false, "threads"_a = 1);
    m.def(
        "rotate",
        [](Input values, Input signs, Output turned, Output flags, float limit, bool bfloat16,
           unsigned threads) {
            const Bytes from(values), diagonal(signs), to(turned, PyBUF_WRITABLE), flag_bytes(flags, PyBUF_WRITABLE);
            const Rotation layout = rotation_of(from, bfloat16, diagonal, limit);
            const WireSource first = source_of(from, layout.count, bfloat16);
            float* out = floats(to, layout.blocks() * layout.block, "turned");
            uint8_t* which = flags_of(flag_bytes, flags, layout);
            nb::gil_scoped_release release;
            rotate(layout, first, out, which, threads);
        },
        "values"_a, "signs"_a, "turned"_a, nb::kw_only(), "flags"_a.none() = nb::none(), "limit"_a = 0.0f,
        "bfloat16"_a = false, "threads"_a = 1);
    m.def(
        "rotate_back",
        [](Input turned, Input signs, Output values, Input flags, bool bfloat16, unsigned threads) {
            const Bytes from(turned), diagonal(signs), flag_bytes(flags), to(values, PyBUF_WRITABLE);
            const Rotation layout = rotation_of(to, bfloat16, diagonal, 0.0f);
            const WireTarget out = target_of(to, layout.count, bfloat16);
            const float* first = floats(from, layout.blocks() * layout.block, "turned");
            const uint8_t* which = flags_of(flag_bytes, flags, layout);
            nb::gil_scoped_release release;
            rotate_back(layout, first, which, out, threads);
        },
        "turned"_a, "signs"_a, "values"_a, nb::kw_only(), "flags"_a.none() = nb::none(), "bfloat16"_a = false,
        "threads"_a = 1);
}

}  // namespace shrinkpoint
