// Bindings of uniform grids and planes of bits.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings/python.hpp"
#include "wire/uniform.hpp"

using namespace nanobind::literals;

namespace shrinkpoint {

namespace {

unsigned checked_bits(unsigned bits) {
    if (bits < 1 || bits > 8) throw nb::value_error("bits: expected 1 to 8");
    return bits;
}

UniformWire laid_out(size_t bytes, size_t width, size_t size, unsigned bits, std::optional<uint32_t> seed, bool brief) {
    if (size == 0) throw nb::value_error("size: expected at least 1");
    if (bytes % width != 0) throw nb::value_error("values: not a whole number of values");
    return {bytes / width, size, checked_bits(bits), brief, seed.has_value(), seed.value_or(0)};
}

void encode(Input values, size_t size, unsigned bits, Output wire, std::optional<uint32_t> seed, bool brief,
            bool bfloat16, unsigned threads) {
    const Bytes from(values), to(wire, PyBUF_WRITABLE);
    const size_t width = bfloat16 ? 2 : 4;
    const UniformWire layout = laid_out(from.size(), width, size, bits, seed, brief);
    const WireSource data(from.checked(from.size(), width, "values"), bfloat16);
    uint8_t* out = to.checked(layout.bytes(), 1, "wire");
    const nb::gil_scoped_release unlocked;
    uniform_encode(layout, data, out, threads);
}

void decode(Input wire, size_t size, unsigned bits, Output values, std::optional<uint32_t> seed, bool brief,
            bool bfloat16, unsigned threads) {
    const Bytes from(wire), to(values, PyBUF_WRITABLE);
    const size_t width = bfloat16 ? 2 : 4;
    const UniformWire layout = laid_out(to.size(), width, size, bits, seed, brief);
    const uint8_t* data = from.checked(layout.bytes(), 1, "wire");
    const WireTarget out(to.checked(to.size(), width, "values"), bfloat16);
    const nb::gil_scoped_release unlocked;
    uniform_decode(layout, data, out, threads);
}

void pack(Input codes, unsigned bits, Output planes) {
    const Bytes from(codes), to(planes, PyBUF_WRITABLE);
    uint8_t* out = to.checked(wire_plane_bytes(from.size(), checked_bits(bits)), 1, "planes");
    const nb::gil_scoped_release unlocked;
    pack_planes(from.data(), from.size(), bits, out);
}

void unpack(Input planes, unsigned bits, Output codes) {
    const Bytes from(planes), to(codes, PyBUF_WRITABLE);
    const uint8_t* data = from.checked(wire_plane_bytes(to.size(), checked_bits(bits)), 1, "planes");
    const nb::gil_scoped_release unlocked;
    unpack_planes(data, to.size(), bits, to.data());
}

size_t count_masked(Input values, size_t width, uint32_t mask) {
    const Bytes from(values);
    if ((width != 2 && width != 4) || from.size() % width != 0)
        throw nb::value_error("width: expected 2 or 4, and a whole number of values");
    const uint8_t* data = from.checked(from.size(), width, "values");
    const size_t count = from.size() / width;
    const nb::gil_scoped_release unlocked;
    if (width == 2) return count_masked16(reinterpret_cast<const uint16_t*>(data), count, static_cast<uint16_t>(mask));
    return count_masked32(reinterpret_cast<const uint32_t*>(data), count, mask);
}

}  // namespace

void bind_wire_uniform(nb::module_& m) {
    m.def("uniform_encode", encode, "values"_a, "size"_a, "bits"_a, "wire"_a, nb::kw_only(), "seed"_a = nb::none(),
          "brief"_a = true, "bfloat16"_a = false, "threads"_a = 1,
          "Writes float32 or bfloat16 values as ranges of runs of `size` and codes. Ranges are bfloat16 if `brief`; codes "
          "are dithered if there is a seed.");
    m.def("uniform_decode", decode, "wire"_a, "size"_a, "bits"_a, "values"_a, nb::kw_only(), "seed"_a = nb::none(),
          "brief"_a = true, "bfloat16"_a = false, "threads"_a = 1, "Decodes a message of uniform_encode.");
    m.def("pack_planes", pack, "codes"_a, "bits"_a, "planes"_a, "Packs codes below 2^bits in planes of 4, 2 and 1 bits.");
    m.def("count_masked", count_masked, "values"_a, "width"_a, "mask"_a,
          "Counts values of 2 or 4 bytes that have all bits of the mask.");
    m.def("unpack_planes", unpack, "planes"_a, "bits"_a, "codes"_a, "Unpacks codes of pack_planes.");
}

}  // namespace shrinkpoint
