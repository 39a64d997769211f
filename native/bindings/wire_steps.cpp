// Bindings of multiples of steps that both ends compute.
#include "bindings/python.hpp"
#include "wire/steps.hpp"

using namespace nanobind::literals;

namespace shrinkpoint {

namespace {

const float* floats_of(const Bytes& data, size_t count, const char* name) {
    return reinterpret_cast<const float*>(data.checked(4 * count, 4, name));
}

void roots(Output moments, float least) {
    const Bytes data(moments, PyBUF_WRITABLE);
    if (data.size() % 4 != 0) throw nb::value_error("moments: not a whole number of values");
    auto* values = reinterpret_cast<float*>(data.checked(data.size(), 4, "moments"));
    const nb::gil_scoped_release unlocked;
    step_roots(values, data.size() / 4, least);
}

Tuple<uint64_t, uint64_t> round(Input values, Input roots, float inverse, Output codes) {
    const Bytes from(values), by(roots), to(codes, PyBUF_WRITABLE);
    const float* data = floats_of(from, to.size(), "values");
    const float* steps = floats_of(by, to.size(), "roots");
    StepSums sums;
    {
        const nb::gil_scoped_release unlocked;
        sums = step_round(data, steps, inverse, to.size(), to.data());
    }
    return Tuple<uint64_t, uint64_t>(nb::make_tuple(sums.magnitudes, sums.escapes));
}

void multiply(Input codes, Input roots, float factor, Output values) {
    const Bytes from(codes), by(roots), to(values, PyBUF_WRITABLE);
    const float* steps = floats_of(by, from.size(), "roots");
    auto* out = reinterpret_cast<float*>(to.checked(4 * from.size(), 4, "values"));
    const nb::gil_scoped_release unlocked;
    step_multiply(from.data(), steps, factor, from.size(), out);
}

}  // namespace

void bind_wire_steps(nb::module_& m) {
    m.def("step_roots", roots, "moments"_a, nb::kw_only(), "least"_a,
          "Turns float32 second moments into their roots, in place; into `least` where a root is below it or not finite.");
    m.def("step_round", round, "values"_a, "roots"_a, nb::kw_only(), "inverse"_a, "codes"_a,
          "Rounds float32 values / roots * inverse to codes from -127 to 127 plus 128; nan to 255. Returns the sum of the "
          "magnitudes of codes, each up to 8, and the count of codes of magnitude 127.");
    m.def("step_multiply", multiply, "codes"_a, "roots"_a, nb::kw_only(), "factor"_a, "values"_a,
          "Writes (code - 128) * factor * root in float32.");
}

}  // namespace shrinkpoint
