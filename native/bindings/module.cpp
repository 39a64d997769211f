// The Python module: checks arguments, releases the GIL, calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <optional>

#include "base/bit_pack.hpp"
#include "base/checksum.hpp"
#include "base/error.hpp"
#include "base/simd.hpp"
#include "base/stream_copy.hpp"
#include "bindings/python.hpp"
#include "entropy/byte_planes.hpp"
#include "entropy/predict.hpp"
#include "entropy/record_codec.hpp"
#include "entropy/tokens.hpp"

using namespace nanobind::literals;
using namespace shrinkpoint;

namespace {

using Shapes = std::vector<std::pair<uint64_t, uint64_t>>;  // rows, columns of each segment

Factors laid_out(const Shapes& shapes, uint64_t count) {
    Factors out;
    uint64_t start = 0, rows = 0, columns = 0;
    for (const auto& [r, c] : shapes) {
        if (r == 0 || c == 0 || r > count / c) throw nb::value_error("segments do not cover the values");
        out.segments.push_back({start, r, c, rows, columns});
        start += r * c, rows += r, columns += c;
    }
    if (start != count) throw nb::value_error("segments do not cover the values");
    out.centers.resize(shapes.size());
    out.rows.resize(rows);
    out.columns.resize(columns);
    return out;
}

// Returns `factors` after checking that they belong to `count` values.
const Factors* checked(const Factors* factors, uint64_t count) {
    if (factors == nullptr) return nullptr;
    const Segment* last = factors->segments.empty() ? nullptr : &factors->segments.back();
    if (last == nullptr || last->start + last->rows * last->columns != count)
        throw nb::value_error("factors: of other values");
    return factors;
}

// Borrowed buffers of one record.
class Record {
   public:
    Record(const Model& model, uint64_t count, nb::handle base, nb::handle moment1, nb::handle moment2,
           nb::handle moment1_base, nb::handle hint)
        : base_(base), moment1_(moment1), moment2_(moment2), moment1_base_(moment1_base), hint_(hint) {
        arrays.base = base_.checked(count * (model.width / 8), model.width / 8, "base");
        arrays.moment1 = floats(moment1_, count, "moment1");
        arrays.moment2 = floats(moment2_, count, "moment2");
        arrays.moment1_base = floats(moment1_base_, count, "moment1_base");
        arrays.hint = hint_.checked(count, 1, "hint");
    }

    Arrays arrays;

   private:
    static const float* floats(const Bytes& bytes, uint64_t count, const char* name) {
        return reinterpret_cast<const float*>(bytes.checked(count * 4, 4, name));
    }
    Bytes base_, moment1_, moment2_, moment1_base_, hint_;
};

uint64_t count_of(const Model& model, const Bytes& values) {
    if (model.width != 8 && model.width != 16 && model.width != 32 && model.width != 64)
        throw Corrupt("a recipe's width is none of 8, 16, 32, 64");
    const size_t bytes = model.width / 8;
    if (values.size() % bytes != 0) throw nb::value_error("values: not a whole number of values");
    values.checked(values.size(), bytes, "values");
    return values.size() / bytes;
}

}  // namespace

bool Bytes::borrow_tensor(nb::handle object, int flags) {
    if (PyObject_CheckBuffer(object.ptr())) return false;
    static nb::handle tensor_type, parameter_type;  // of torch, which whoever has a tensor has imported
    if (!tensor_type.is_valid()) {
        const auto modules = nb::borrow<nb::dict>(nb::module_::import_("sys").attr("modules"));
        if (!modules.contains("torch")) return false;
        tensor_type = nb::object(modules["torch"].attr("Tensor")).release();
        parameter_type = nb::object(modules["torch"].attr("nn").attr("Parameter")).release();
    }
    const nb::handle type = object.type();
    const bool known = type.is(tensor_type) || type.is(parameter_type);
    if (!known && PyObject_IsInstance(object.ptr(), tensor_type.ptr()) != 1) return false;
    static PyObject* const is_cpu = PyUnicode_InternFromString("is_cpu");
    static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    static PyObject* const methods[] = {PyUnicode_InternFromString("is_contiguous"),
                                        PyUnicode_InternFromString("is_neg"), PyUnicode_InternFromString("is_conj")};
    const auto valid = [](PyObject* result) {
        if (result == nullptr) throw nb::python_error();
        return nb::steal(result);
    };
    const auto attribute = [&](PyObject* name) { return valid(PyObject_GetAttr(object.ptr(), name)); };
    const auto call = [&](PyObject* name) {
        return valid(PyObject_CallMethodObjArgs(object.ptr(), name, nullptr));
    };
    if (known && attribute(is_cpu).is(Py_True) && call(methods[0]).is(Py_True) && call(methods[1]).is(Py_False) &&
        call(methods[2]).is(Py_False)) {
        data_ = reinterpret_cast<uint8_t*>(nb::cast<uintptr_t>(call(data_ptr)));
        size_ = nb::cast<size_t>(attribute(nbytes)), present_ = true;
        if (data_ == nullptr && size_ != 0) throw nb::value_error("a tensor without memory");
        return true;
    }
    if ((flags & PyBUF_WRITABLE) != 0) throw nb::value_error("a tensor to write to is not contiguous in host memory");
    copy_ = nb::module_::import_("shrinkpoint.tensors.dtypes").attr("tensor_bytes")(object);
    get_buffer(copy_, flags);
    return true;
}

std::string shrinkpoint::hex_of(const Digest128& digest) {
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(digest.high),
                  static_cast<unsigned long long>(digest.low));
    return text;
}

ChunkRange shrinkpoint::chunk_range_of(uint64_t count, size_t chunk, size_t first, uint64_t here) {
    if (first > count / chunk || here > count - first * chunk) throw nb::value_error("a range beyond the record");
    const uint64_t start = first * chunk;
    if (here % chunk != 0 && start + here != count) throw nb::value_error("a range that ends within a chunk");
    return {count, chunk, first, first + static_cast<size_t>((here - 1) / chunk) + 1};
}

NB_MODULE(_native, m) {
    nb::exception<Corrupt>(m, "Corrupt");
    nb::exception<Truncated>(m, "Truncated");
    nb::exception<DropsBits>(m, "DropsBits", PyExc_ValueError);

    nb::enum_<Tokens>(m, "Tokens")
        .value("LEVEL", Tokens::Level)
        .value("DELTA", Tokens::Delta)
        .value("PLANES", Tokens::Planes)
        .value("CODES", Tokens::Codes);
    nb::enum_<Predictor>(m, "Predictor")
        .value("NONE", Predictor::None)
        .value("BASE", Predictor::Base)
        .value("ADAM", Predictor::Adam)
        .value("SQUARE", Predictor::Square);
    nb::enum_<Companion>(m, "Companion")
        .value("NONE", Companion::None)
        .value("BASE", Companion::Base)
        .value("MOMENT1", Companion::Moment1);
    nb::class_<Model>(m, "Model")
        .def(nb::init<>())
        .def_rw("tokens", &Model::tokens)
        .def_rw("predictor", &Model::predictor)
        .def_rw("companion", &Model::companion)
        .def_rw("width", &Model::width)
        .def_rw("mantissa", &Model::mantissa)
        .def_rw("fine", &Model::fine)
        .def_rw("shift", &Model::shift)
        .def_rw("has_sign", &Model::has_sign)
        .def_rw("bias", &Model::bias)
        .def_rw("top", &Model::top)
        .def_prop_rw(
            "parameters",
            [](const Model& model) { return std::vector<float>(model.parameters, model.parameters + 4); },
            [](Model& model, const std::vector<float>& values) {
                if (values.size() != 4) throw nb::value_error("parameters: expected four");
                std::copy(values.begin(), values.end(), model.parameters);
            });
    nb::class_<Factors>(m, "Factors");

    m.def(
        "empty", [](size_t size) { return array_of(Buffer(size)); }, "size"_a);
    m.def(
        "fit_factors",
        [](const Model& model, Input values, const Shapes& shapes) {
            const Bytes bytes(values);
            const uint64_t count = count_of(model, bytes);
            Model bare = model;  // what a context needs besides is not there yet
            bare.companion = Companion::None;
            check(bare, Arrays{}, true);
            Factors factors = laid_out(shapes, count);
            nb::gil_scoped_release release;
            fit_factors(bytes.data(), model.width, model.mantissa, model.fine, factors);
            return factors;
        },
        "model"_a, "values"_a, "shapes"_a);
    m.def(
        "difference_classes",
        [](const Model& model, Input values, Input others) {
            const Bytes a(values), b(others);
            const uint64_t count = count_of(model, a);
            const uint8_t* other = b.checked(a.size(), model.width / 8, "others");
            Buffer out(count);
            {
                nb::gil_scoped_release release;
                difference_classes(model, a.data(), other, count, out.data());
            }
            return array_of(std::move(out));
        },
        "model"_a, "values"_a, "others"_a);
    m.def(
        "estimate_bits",
        [](const Model& model, Input values, Input base, Input moment1, Input moment2,
           Input moment1_base, Input hint, const Factors* factors, unsigned stride, unsigned threads) {
            const Bytes bytes(values);
            const uint64_t count = count_of(model, bytes);
            Record record(model, count, base, moment1, moment2, moment1_base, hint);
            record.arrays.factors = checked(factors, count);
            if (count == 0 || stride == 0) throw nb::value_error("nothing to estimate_bits");
            check(model, record.arrays, factors != nullptr);
            nb::gil_scoped_release release;
            return estimate_bits(model, record.arrays, bytes.data(), count, stride, threads);
        },
        "model"_a, "values"_a, nb::kw_only(), "base"_a.none() = nb::none(), "moment1"_a.none() = nb::none(),
        "moment2"_a.none() = nb::none(), "moment1_base"_a.none() = nb::none(), "hint"_a.none() = nb::none(),
        "factors"_a.none() = nb::none(),
        "stride"_a = 1, "threads"_a = 1);
    m.def(
        "encode",
        [](const Model& model, Input values, Input base, Input moment1, Input moment2,
           Input moment1_base, Input hint, const Factors* factors, size_t chunk, unsigned threads) {
            const Bytes bytes(values);
            const uint64_t count = count_of(model, bytes);
            Record record(model, count, base, moment1, moment2, moment1_base, hint);
            record.arrays.factors = checked(factors, count);
            if (count == 0 || chunk == 0) throw nb::value_error("nothing to encode");
            check(model, record.arrays, factors != nullptr);
            EncodedRecord coded;
            {
                nb::gil_scoped_release release;
                coded = encode(model, record.arrays, bytes.data(), count, chunk, threads);
            }
            return std::make_pair(array_of(std::move(coded.side)), array_of(std::move(coded.codes)));
        },
        "model"_a, "values"_a, nb::kw_only(), "base"_a.none() = nb::none(), "moment1"_a.none() = nb::none(),
        "moment2"_a.none() = nb::none(), "moment1_base"_a.none() = nb::none(), "hint"_a.none() = nb::none(),
        "factors"_a.none() = nb::none(),
        "chunk"_a = kChunk, "threads"_a = 1);
    m.def(
        "decode",
        [](const Model& model, Input side, Input codes, Output out, Input base, Input moment1,
           Input moment2, Input moment1_base, Input hint, const std::optional<Shapes>& shapes,
           size_t chunk, unsigned threads) {
            const Bytes side_bytes(side), code_bytes(codes), values(out, PyBUF_WRITABLE);
            const uint64_t count = count_of(model, values);
            const Record record(model, count, base, moment1, moment2, moment1_base, hint);
            if (count == 0 || chunk == 0) throw nb::value_error("nothing to decode");
            check(model, record.arrays, shapes.has_value());
            Factors factors;
            if (shapes) factors = laid_out(*shapes, count);
            nb::gil_scoped_release release;
            decode(model, record.arrays, shapes ? &factors : nullptr, side_bytes.data(), side_bytes.size(),
                   code_bytes.data(), code_bytes.size(), values.data(), count, chunk, threads);
        },
        "model"_a, "side"_a, "codes"_a, "out"_a, nb::kw_only(), "base"_a.none() = nb::none(),
        "moment1"_a.none() = nb::none(), "moment2"_a.none() = nb::none(), "moment1_base"_a.none() = nb::none(),
        "hint"_a.none() = nb::none(), "shapes"_a.none() = nb::none(), "chunk"_a = kChunk, "threads"_a = 1);

    m.def(
        "decode_chunks",
        [](const Model& model, Input side, Input codes, Output out, uint64_t count, size_t first,
           Input base, Input moment1, Input moment2, Input moment1_base, Input hint,
           const std::optional<Shapes>& shapes, size_t chunk, unsigned threads) {
            const Bytes side_bytes(side), code_bytes(codes), values(out, PyBUF_WRITABLE);
            const uint64_t here = count_of(model, values);
            const Record record(model, here, base, moment1, moment2, moment1_base, hint);
            if (here == 0 || chunk == 0) throw nb::value_error("nothing to decode");
            const ChunkRange range = chunk_range_of(count, chunk, first, here);
            check(model, record.arrays, shapes.has_value());
            Factors factors;
            if (shapes) factors = laid_out(*shapes, count);
            nb::gil_scoped_release release;
            decode_chunks(model, record.arrays, shapes ? &factors : nullptr, side_bytes.data(), side_bytes.size(),
                           code_bytes.data(), code_bytes.size(), values.data(), range, threads);
        },
        "model"_a, "side"_a, "codes"_a, "out"_a, "count"_a, "first"_a, nb::kw_only(), "base"_a.none() = nb::none(),
        "moment1"_a.none() = nb::none(), "moment2"_a.none() = nb::none(), "moment1_base"_a.none() = nb::none(),
        "hint"_a.none() = nb::none(), "shapes"_a.none() = nb::none(), "chunk"_a = kChunk, "threads"_a = 1);

    bind_quantizers(m);
    bind_wire_uniform(m);
    bind_wire_blocks(m);
    bind_wire_steps(m);
    bind_wire_sparse(m);

    // For tests only: uses nothing wider than this (0 none, 1 AVX2, 2 AVX-512) from now on. Returns what is used.
    m.def(
        "_use_simd",
        [](int most) {
            limit_simd(static_cast<Simd>(most < 0 ? 0 : most));
            return static_cast<int>(simd());
        },
        "most"_a);
    m.def(
        "xxh3_128",
        [](Input data) {
            const Bytes bytes(data);
            nb::gil_scoped_release release;
            return hex_of(xxh3_128(bytes.data(), bytes.size()));
        },
        "data"_a);
    m.def(
        "pack_bits",
        [](const nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& codes, unsigned bits) {
            if (bits < 1 || bits > 32) throw nb::value_error("bits: expected 1 to 32");
            Buffer out(packed_size(codes.size(), bits));
            {
                nb::gil_scoped_release release;
                pack_bits(codes.data(), codes.size(), bits, out.data());
            }
            return array_of(std::move(out));
        },
        "codes"_a, "bits"_a);
    m.def(
        "unpack_bits",
        [](Input data, size_t count, unsigned bits) {
            const Bytes bytes(data);
            if (bits < 1 || bits > 32) throw nb::value_error("bits: expected 1 to 32");
            if (count > (SIZE_MAX - 7) / 32 || bytes.size() != packed_size(count, bits))
                throw Truncated("packed codes have the wrong number of bytes for their count");
            auto* out = new std::vector<uint32_t>(count);
            const nb::capsule owner(out, [](void* p) noexcept { delete static_cast<std::vector<uint32_t>*>(p); });
            {
                nb::gil_scoped_release release;
                unpack_bits(bytes.data(), count, bits, out->data());
            }
            return nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>(out->data(), {count}, owner);
        },
        "data"_a, "count"_a, "bits"_a);
    m.def(
        "split_planes",
        [](Input values, unsigned width) {
            const Bytes bytes(values);
            if (width < 1 || width > 8 || bytes.size() % width != 0) throw nb::value_error("width: expected 1 to 8");
            Buffer out(bytes.size());
            {
                nb::gil_scoped_release release;
                split_planes(bytes.data(), bytes.size() / width, width, out.data());
            }
            return array_of(std::move(out));
        },
        "values"_a, "width"_a);
    m.def(
        "join_planes",
        [](Input planes, unsigned width) {
            const Bytes bytes(planes);
            if (width < 1 || width > 8 || bytes.size() % width != 0) throw nb::value_error("width: expected 1 to 8");
            Buffer out(bytes.size());
            {
                nb::gil_scoped_release release;
                join_planes(bytes.data(), bytes.size() / width, width, out.data());
            }
            return array_of(std::move(out));
        },
        "planes"_a, "width"_a);
    m.def(
        "stream_copy",
        [](const std::vector<Input>& sources, const std::vector<Output>& targets, unsigned threads) {
            if (sources.size() != targets.size()) throw nb::value_error("as many targets as sources are needed");
            std::deque<Bytes> held;
            std::vector<Copy> copies;
            for (size_t i = 0; i < sources.size(); ++i) {
                const Bytes& from = held.emplace_back(sources[i]);
                const Bytes& to = held.emplace_back(targets[i], PyBUF_WRITABLE);
                copies.push_back({from.data(), from.size(), to.checked(from.size(), 1, "target")});
            }
            nb::gil_scoped_release release;
            stream_copy(copies, threads);
        },
        "sources"_a, "targets"_a, "threads"_a = 1);
    nb::class_<Hasher>(m, "Hasher")
        .def(nb::init<>())
        .def("update",
             [](Hasher& hasher, Input data) {
                 const Bytes bytes(data);
                 nb::gil_scoped_release release;
                 hasher.update(bytes.data(), bytes.size());
             }, "data"_a)
        .def("hexdigest", [](const Hasher& hasher) { return hex_of(hasher.digest()); });
}
