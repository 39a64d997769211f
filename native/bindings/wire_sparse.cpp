// Bindings of sparse messages, for comm/compressors/sparse.py and index_coding.py.
#include <nanobind/stl/string.h>

#include <limits>
#include <string>

#include "bindings/python.hpp"
#include "wire/sparse.hpp"

using namespace nanobind::literals;

namespace shrinkpoint {

namespace {

constexpr uint64_t kMaxIndices = uint64_t{1} << kMaxIndexBits;
constexpr uint64_t kMaxColumns = std::numeric_limits<uint32_t>::max();

IndexForm form_of(const std::string& name) {
    if (name == "all") return IndexForm::All;
    if (name == "bitmap") return IndexForm::Bitmap;
    if (name == "packed") return IndexForm::Packed;
    if (name == "split") return IndexForm::Split;
    throw nb::value_error("form: expected all, bitmap, packed or split");
}

// Returns the number of words in a buffer.
template <typename Word>
size_t count_of(const Bytes& bytes, const char* name) {
    if (bytes.size() % sizeof(Word) != 0) throw nb::value_error(name);
    bytes.checked(bytes.size(), sizeof(Word), name);
    return bytes.size() / sizeof(Word);
}

IndexCode code_of(const std::string& form, uint64_t n, unsigned width, uint64_t k, const Bytes& data) {
    const IndexCode code{form_of(form), n, k, width};
    if (width > kMaxIndexBits || n > kMaxIndices || k > n) throw nb::value_error("indices: too many, or too wide");
    if (data.size() != code.size()) throw nb::value_error("indices: wrong number of bytes");
    return code;
}

}  // namespace

void bind_wire_sparse(nb::module_& m) {
    m.def(
        "indices_encode",
        [](const std::string& form, uint64_t n, unsigned width, Input indices, Output out) {
            const Bytes from(indices), into(out, PyBUF_WRITABLE);
            const IndexCode code = code_of(form, n, width, count_of<int64_t>(from, "indices"), into);
            nb::gil_scoped_release release;
            return encode_indices(code, reinterpret_cast<const int64_t*>(from.data()), into.data());
        },
        "form"_a, "n"_a, "width"_a, "indices"_a, "out"_a);
    m.def(
        "indices_decode",
        [](const std::string& form, uint64_t n, unsigned width, Input data, Output indices) {
            const Bytes from(data), into(indices, PyBUF_WRITABLE);
            const IndexCode code = code_of(form, n, width, count_of<int64_t>(into, "indices"), from);
            nb::gil_scoped_release release;
            return decode_indices(code, from.data(), reinterpret_cast<int64_t*>(into.data()));
        },
        "form"_a, "n"_a, "width"_a, "data"_a, "indices"_a);
    m.def(
        "sparse_encode",
        [](const std::string& form, unsigned width, Input values, size_t columns, size_t kept, Output out,
           Output chosen, unsigned threads) {
            const Bytes from(values), into(out, PyBUF_WRITABLE), what(chosen, PyBUF_WRITABLE);
            const size_t n = count_of<float>(from, "values"), k = what.size() / 4;
            const IndexCode code = code_of(form, n, width, k, into);
            const Rows rows{columns, kept};
            if (what.size() % 4 != 0 || k == 0 || !rows.fits(n, k))
                throw nb::value_error("rows: expected as many values in each but the last, and as many chosen");
            nb::gil_scoped_release release;
            return encode_largest(code, reinterpret_cast<const uint32_t*>(from.data()), rows, into.data(),
                                  what.data(), threads);
        },
        "form"_a, "width"_a, "values"_a, "columns"_a, "kept"_a, "out"_a, "chosen"_a, nb::kw_only(), "threads"_a = 1);
    m.def(
        "sparse_decode",
        [](const std::string& form, unsigned width, Input data, Input chosen, Output out, size_t item) {
            const Bytes from(data), what(chosen), into(out, PyBUF_WRITABLE);
            if ((item != 2 && item != 4 && item != 8) || what.size() % item != 0 || into.size() % item != 0)
                throw nb::value_error("item: expected 2, 4 or 8, and a whole number of values");
            const IndexCode code = code_of(form, into.size() / item, width, what.size() / item, from);
            nb::gil_scoped_release release;
            return decode_spread(code, from.data(), what.data(), item, into.data());
        },
        "form"_a, "width"_a, "data"_a, "chosen"_a, "out"_a, "item"_a);
    m.def(
        "sparse_gather",
        [](Input values, Input indices, Output chosen) {
            const Bytes from(values), where(indices), what(chosen, PyBUF_WRITABLE);
            const size_t count = count_of<float>(from, "values"), k = count_of<int64_t>(where, "indices");
            what.checked(k * 4, 4, "chosen");
            bool fine = false, lost = false;
            {
                nb::gil_scoped_release release;
                fine = gather(reinterpret_cast<const uint32_t*>(from.data()), count,
                              reinterpret_cast<const int64_t*>(where.data()), k,
                              reinterpret_cast<uint32_t*>(what.data()), lost);
            }
            if (!fine) throw nb::value_error("indices: not all of them are there");
            return lost;
        },
        "values"_a, "indices"_a, "chosen"_a);
    m.def(
        "sparse_random",
        [](size_t n, uint32_t seed, Output indices) {
            const Bytes where(indices, PyBUF_WRITABLE);
            const size_t k = count_of<int64_t>(where, "indices");
            if (k == 0 || k > n || n > kMaxColumns) throw nb::value_error("indices: expected some of fewer than 2^32");
            nb::gil_scoped_release release;
            least_hashes(seed, n, k, reinterpret_cast<int64_t*>(where.data()));
        },
        "n"_a, "seed"_a, "indices"_a);
}

}  // namespace shrinkpoint
