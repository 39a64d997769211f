// What quantizers use of the core: checks arguments, releases the GIL, calls.
#include <nanobind/stl/vector.h>

#include "cyclic.hpp"
#include "kmeans.hpp"
#include "python.hpp"

using namespace nanobind::literals;

namespace shrinkpoint {

namespace {

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, double, nb::ndim<1>> array_of(std::vector<double>&& data) {
    auto* owned = new std::vector<double>(std::move(data));
    const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
    return {owned->data(), {owned->size()}, owner};
}

Points points_of(const Doubles& values, const Doubles& weights) {
    if (values.size() != weights.size()) throw nb::value_error("weights: expected one for each value");
    return {values.data(), weights.data(), values.size()};
}

bool overlap(const Bytes& a, const Bytes& b) {
    const auto start_a = reinterpret_cast<uintptr_t>(a.data()), start_b = reinterpret_cast<uintptr_t>(b.data());
    return start_a < start_b + b.size() && start_b < start_a + a.size();
}

void bind_cyclic(nb::module_& m) {
    m.def(
        "cyclic_encode",
        [](nb::handle codes, nb::handle previous, unsigned modulus, bool rearranged, bool runs) {
            const Bytes values(codes), before(previous);
            before.checked(values.size(), 1, "previous");
            // An empty buffer may have no address: nothing is before it either way.
            const uint8_t* first = previous.is_none() ? nullptr : before.data();
            Buffer out;
            {
                nb::gil_scoped_release release;
                out = cyclic_encode({modulus, rearranged, runs}, values.data(), first, values.size());
            }
            return array_of(std::move(out));
        },
        "codes"_a, "previous"_a.none(), nb::kw_only(), "modulus"_a, "rearranged"_a, "runs"_a);
    m.def(
        "cyclic_decode",
        [](nb::handle data, nb::handle previous, unsigned modulus, bool rearranged, bool runs, nb::handle out) {
            const Bytes coded(data), before(previous), values(out, PyBUF_WRITABLE);
            before.checked(values.size(), 1, "previous");
            if (overlap(values, coded) || overlap(values, before))
                throw nb::value_error("out: shares memory with what is read");
            const uint8_t* first = previous.is_none() ? nullptr : before.data();
            nb::gil_scoped_release release;
            cyclic_decode({modulus, rearranged, runs}, coded.data(), coded.size(), first, values.data(), values.size());
        },
        "data"_a, "previous"_a.none(), nb::kw_only(), "modulus"_a, "rearranged"_a, "runs"_a, "out"_a);
}

void bind_kmeans(nb::module_& m) {
    m.def(
        "kmeans",
        [](const Doubles& values, const Doubles& weights, const Doubles& centers, unsigned iterations,
           double tolerance) {
            const Points points = points_of(values, weights);
            std::vector<double> out(centers.data(), centers.data() + centers.size());
            {
                nb::gil_scoped_release release;
                out = kmeans(points, std::move(out), iterations, tolerance);
            }
            return array_of(std::move(out));
        },
        "values"_a, "weights"_a, "centers"_a, nb::kw_only(), "iterations"_a, "tolerance"_a);
    m.def(
        "kmeans_start",
        [](const Doubles& values, const Doubles& weights, unsigned k, uint64_t seed, bool squared) {
            const Points points = points_of(values, weights);
            std::vector<double> out;
            {
                nb::gil_scoped_release release;
                out = kmeans_start(points, k, seed, squared);
            }
            return array_of(std::move(out));
        },
        "values"_a, "weights"_a, "k"_a, nb::kw_only(), "seed"_a, "squared"_a);
}

}  // namespace

void bind_quantizers(nb::module_& m) {
    bind_cyclic(m);
    bind_kmeans(m);
}

}  // namespace shrinkpoint
