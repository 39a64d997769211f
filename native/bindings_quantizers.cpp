// What quantizers use of the core: checks arguments, releases the GIL, calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <optional>

#include "cyclic_delta.hpp"
#include "kmeans.hpp"
#include "lattice_codec.hpp"
#include "progress.hpp"
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

WeightedSamples points_of(const Doubles& values, const Doubles& weights) {
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
            const WeightedSamples points = points_of(values, weights);
            std::vector<double> out(centers.data(), centers.data() + centers.size());
            {
                nb::gil_scoped_release release;
                out = kmeans(points, std::move(out), iterations, tolerance);
            }
            return array_of(std::move(out));
        },
        "values"_a, "weights"_a, "centers"_a, nb::kw_only(), "iterations"_a, "tolerance"_a);
    m.def(
        "kmeans_plus_plus",
        [](const Doubles& values, const Doubles& weights, unsigned k, uint64_t seed, bool squared) {
            const WeightedSamples points = points_of(values, weights);
            std::vector<double> out;
            {
                nb::gil_scoped_release release;
                out = kmeans_plus_plus(points, k, seed, squared);
            }
            return array_of(std::move(out));
        },
        "values"_a, "weights"_a, "k"_a, nb::kw_only(), "seed"_a, "squared"_a);
}

std::vector<int16_t> exponents_of(nb::handle object, const char* name) {
    const Bytes bytes(object);
    const auto* first = reinterpret_cast<const int16_t*>(bytes.checked(bytes.size() / 2 * 2, 2, name));
    return {first, first + bytes.size() / 2};
}

// An array of so many elements, which may be missing where it is read.
template <typename T>
T* whole(uint64_t count, const Bytes& bytes, const char* name) {
    return reinterpret_cast<T*>(bytes.checked(count * sizeof(T), sizeof(T), name));
}

template <typename T>
T* needed(uint64_t count, const Bytes& bytes, const char* name) {
    if (bytes.size() != count * sizeof(T))
        throw nb::value_error((std::string(name) + ": wrong number of bytes").c_str());
    return whole<T>(count, bytes, name);
}

Floats floats_of(uint64_t count, const Bytes& bytes, const char* name) {
    const bool narrow = bytes.size() == 2 * count;
    if (narrow) return {reinterpret_cast<const uint8_t*>(whole<const uint16_t>(count, bytes, name)), 2};
    return {reinterpret_cast<const uint8_t*>(whole<const float>(count, bytes, name)), 4};
}

// All positions of a lattice's tensor; or those from `first` on that an array of two bytes for each is made for.
Positions positions_of(const Lattice& lattice, std::optional<uint64_t> first, const Bytes& codes) {
    if (!first) return {0, lattice.count()};
    const uint64_t count = codes.size() / 2;
    if (*first > lattice.count() || count > lattice.count() - *first)
        throw nb::value_error("first: positions beyond the tensor");
    return {*first, count};
}

// What is written shares nothing with what is read meanwhile.
void apart(const Bytes& written, std::initializer_list<const Bytes*> read) {
    for (const Bytes* one : read)
        if (overlap(written, *one)) throw nb::value_error("an array that is written shares memory with another one");
}

nb::tuple encoded(const Lattice& lattice, nb::handle codes, nb::handle contexts, nb::handle tokens, nb::handle parent,
                  nb::handle squares, nb::handle expected, unsigned threads) {
    const Bytes points(codes), parents(parent), beside(squares), values(expected);
    const Bytes told(contexts, PyBUF_WRITABLE), out(tokens, PyBUF_WRITABLE);
    apart(told, {&points, &parents, &beside, &values, &out});
    apart(out, {&points, &parents, &beside, &values});
    const auto* before = whole<const float>(lattice.count(), beside, "squares");
    const auto* from = needed<const int16_t>(lattice.count(), points, "codes");
    auto* under = needed<uint8_t>(lattice.count(), told, "contexts");
    auto* to = needed<uint8_t>(lattice.count(), out, "tokens");
    const Floats known = floats_of(lattice.count(), parents, "parent"), wanted = floats_of(lattice.count(), values, "expected");
    Differences found;
    Buffer escapes;
    {
        nb::gil_scoped_release release;
        found = lattice_encode(lattice, known, before, from, wanted, under, to, threads);
        const auto* first = reinterpret_cast<const uint8_t*>(found.escapes.data());
        escapes.assign(first, first + 4 * found.escapes.size());
    }
    return nb::make_tuple(array_of(std::move(escapes)), found.in_range, found.same);
}

size_t decoded(const Lattice& lattice, nb::handle tokens, nb::handle contexts, nb::handle escapes, nb::handle codes,
               nb::handle values, nb::handle squares, std::optional<uint64_t> first, unsigned threads) {
    const Bytes symbols(tokens), told(contexts), large(escapes), beside(squares);
    const Bytes points(codes, PyBUF_WRITABLE), made(values, PyBUF_WRITABLE);
    apart(points, {&symbols, &told, &large, &beside, &made});
    apart(made, {&symbols, &told, &large, &beside});
    const Positions positions = positions_of(lattice, first, points);
    const auto* from = needed<const uint8_t>(positions.count, symbols, "tokens");
    const auto* under = needed<const uint8_t>(positions.count, told, "contexts");
    const size_t count = large.size() / 4;
    const auto* beyond = reinterpret_cast<const int32_t*>(large.checked(4 * count, 4, "escapes"));
    const auto* factor = whole<const float>(positions.count, beside, "squares");
    auto* to = needed<int16_t>(positions.count, points, "codes");
    auto* out = needed<float>(positions.count, made, "values");
    nb::gil_scoped_release release;
    return lattice_decode(lattice, from, under, beyond, count, factor, to, out, positions, threads);
}

void bind_lattice(nb::module_& m) {
    nb::class_<Lattice>(m, "Lattice")
        .def(
            "__init__",
            [](Lattice* self, nb::handle rows, nb::handle columns, uint64_t height, uint64_t width, bool powers,
               int32_t step, uint32_t seed) {
                new (self) Lattice(powers, exponents_of(rows, "rows"), exponents_of(columns, "columns"), height, width,
                                   step, seed);
            },
            "rows"_a, "columns"_a, "height"_a, "width"_a, nb::kw_only(), "powers"_a = false, "step"_a = 1,
            "seed"_a = 0);
    m.def(
        "lattice_predict",
        [](const Lattice& lattice, nb::handle guesses, nb::handle contexts, nb::handle parent, nb::handle squares,
           std::optional<uint64_t> first, unsigned threads) {
            const Bytes parents(parent), beside(squares);
            const Bytes out(guesses, PyBUF_WRITABLE), told(contexts, PyBUF_WRITABLE);
            apart(out, {&parents, &beside, &told});
            apart(told, {&parents, &beside});
            const Positions positions = positions_of(lattice, first, out);
            const Floats known = floats_of(positions.count, parents, "parent");
            const auto* factor = whole<const float>(positions.count, beside, "squares");
            auto* to = needed<int16_t>(positions.count, out, "guesses");
            auto* under = needed<uint8_t>(positions.count, told, "contexts");
            nb::gil_scoped_release release;
            lattice_predict(lattice, known, factor, to, under, positions, threads);
        },
        "lattice"_a, "guesses"_a, "contexts"_a, nb::kw_only(), "parent"_a.none() = nb::none(),
        "squares"_a.none() = nb::none(), "first"_a.none() = nb::none(), "threads"_a = 1);
    m.def("lattice_encode", encoded, "lattice"_a, "codes"_a, "contexts"_a, "tokens"_a, nb::kw_only(),
          "parent"_a.none() = nb::none(), "squares"_a.none() = nb::none(), "expected"_a.none() = nb::none(),
          "threads"_a = 1);
    m.def("lattice_decode", decoded, "lattice"_a, "tokens"_a, "contexts"_a, "escapes"_a, "codes"_a, "values"_a,
          nb::kw_only(), "squares"_a.none() = nb::none(), "first"_a.none() = nb::none(), "threads"_a = 1);
    m.def(
        "lattice_values",
        [](const Lattice& lattice, nb::handle codes, nb::handle values, nb::handle squares, unsigned threads) {
            const Bytes points(codes), beside(squares), made(values, PyBUF_WRITABLE);
            apart(made, {&points, &beside});
            const auto* from = needed<const int16_t>(lattice.count(), points, "codes");
            const auto* factor = whole<const float>(lattice.count(), beside, "squares");
            auto* to = needed<float>(lattice.count(), made, "values");
            nb::gil_scoped_release release;
            lattice_values(lattice, from, factor, to, threads);
        },
        "lattice"_a, "codes"_a, "values"_a, nb::kw_only(), "squares"_a.none() = nb::none(), "threads"_a = 1);
    m.def(
        "lattice_quantize",
        [](const Lattice& lattice, nb::handle values, nb::handle codes, nb::handle squares, nb::handle before,
           float hold, unsigned threads) {
            const Bytes wanted(values), beside(squares), old(before), points(codes, PyBUF_WRITABLE);
            apart(points, {&wanted, &beside, &old});
            const Floats from = floats_of(lattice.count(), wanted, "values");
            if (from.data == nullptr && lattice.count() != 0) throw nb::value_error("values: none");
            const auto* factor = whole<const float>(lattice.count(), beside, "squares");
            const auto* held = whole<const int16_t>(lattice.count(), old, "before");
            auto* to = needed<int16_t>(lattice.count(), points, "codes");
            nb::gil_scoped_release release;
            return lattice_quantize(lattice, from, factor, held, hold, to, threads);
        },
        "lattice"_a, "values"_a, "codes"_a, nb::kw_only(), "squares"_a.none() = nb::none(),
        "before"_a.none() = nb::none(), "hold"_a = 0.5f, "threads"_a = 1);
}

void bind_progress(nb::module_& m) {
    m.def(
        "progress_sums",
        [](nb::handle weight, nb::handle parent_weight, nb::handle stored, nb::handle parent_stored, uint64_t count,
           unsigned threads) {
            const Bytes now(weight), before(parent_weight), decoded(stored), decoded_before(parent_stored);
            const Floats arrays[] = {floats_of(count, now, "weight"), floats_of(count, before, "parent_weight"),
                                     floats_of(count, decoded, "stored"),
                                     floats_of(count, decoded_before, "parent_stored")};
            ProgressSums sums;
            {
                nb::gil_scoped_release release;
                sums = progress_sums(arrays[0], arrays[1], arrays[2], arrays[3], count, threads);
            }
            return nb::make_tuple(sums.movement, sums.stored_movement, sums.weight, sums.stored_weight);
        },
        "weight"_a, "parent_weight"_a, "stored"_a, "parent_stored"_a, "count"_a, nb::kw_only(), "threads"_a = 1);
}

}  // namespace

void bind_quantizers(nb::module_& m) {
    bind_progress(m);
    bind_cyclic(m);
    bind_kmeans(m);
    bind_lattice(m);
}

}  // namespace shrinkpoint
