// Bindings of quantizers: checks arguments, releases the GIL, calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <initializer_list>
#include <optional>

#include "bindings/python.hpp"
#include "entropy/cyclic_delta.hpp"
#include "lattice/codec.hpp"
#include "lattice/error_feedback.hpp"
#include "lattice/kmeans.hpp"
#include "lattice/movement.hpp"
#include "lattice/progress.hpp"
#include "lattice/quantize.hpp"
#include "lattice/second_moments.hpp"
#include "lattice/value_sums.hpp"

using namespace nanobind::literals;

namespace shrinkpoint {

namespace {

constexpr uint64_t kMaxValues = uint64_t{1} << 56;  // so that bytes of them can be counted

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using DoubleArray = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

DoubleArray array_of(std::vector<double>&& data) {
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
        [](Input codes, Input previous, unsigned modulus, bool rearranged, bool runs) {
            const Bytes values(codes), previous_codes(previous);
            previous_codes.checked(values.size(), 1, "previous");
            // An empty buffer may have no address; nothing precedes it either way.
            const uint8_t* previous_data = previous.is_none() ? nullptr : previous_codes.data();
            Buffer out;
            {
                nb::gil_scoped_release release;
                out = cyclic_encode({modulus, rearranged, runs}, values.data(), previous_data, values.size());
            }
            return array_of(std::move(out));
        },
        "codes"_a, "previous"_a.none(), nb::kw_only(), "modulus"_a, "rearranged"_a, "runs"_a);
    m.def(
        "cyclic_decode",
        [](Input data, Input previous, unsigned modulus, bool rearranged, bool runs, Output out) {
            const Bytes coded(data), previous_codes(previous), values(out, PyBUF_WRITABLE);
            previous_codes.checked(values.size(), 1, "previous");
            if (overlap(values, coded) || overlap(values, previous_codes))
                throw nb::value_error("out: shares memory with what is read");
            const uint8_t* previous_data = previous.is_none() ? nullptr : previous_codes.data();
            nb::gil_scoped_release release;
            cyclic_decode({modulus, rearranged, runs}, coded.data(), coded.size(), previous_data, values.data(),
                          values.size());
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

// Returns an array of `count` elements; null for None.
template <typename T>
T* optional_array(uint64_t count, const Bytes& bytes, const char* name) {
    return reinterpret_cast<T*>(bytes.checked(count * sizeof(T), sizeof(T), name));
}

template <typename T>
T* array_of_size(uint64_t count, const Bytes& bytes, const char* name) {
    if (bytes.size() != count * sizeof(T))
        throw nb::value_error((std::string(name) + ": wrong number of bytes").c_str());
    return optional_array<T>(count, bytes, name);
}

Floats floats_of(uint64_t count, const Bytes& bytes, const char* name) {
    const bool narrow = bytes.size() == 2 * count;
    if (narrow) return {reinterpret_cast<const uint8_t*>(optional_array<const uint16_t>(count, bytes, name)), 2};
    return {reinterpret_cast<const uint8_t*>(optional_array<const float>(count, bytes, name)), 4};
}

// Returns codes of one byte or of two, by the size of the array; none for None.
Codes codes_of(uint64_t count, const Bytes& bytes, const char* name) {
    if (bytes.size() == count)
        return {reinterpret_cast<const uint8_t*>(optional_array<const int8_t>(count, bytes, name)), 1};
    return {reinterpret_cast<const uint8_t*>(optional_array<const int16_t>(count, bytes, name)), 2};
}

// Same, but None is an error.
Codes required_codes(uint64_t count, const Bytes& bytes) {
    if (bytes.size() != count && bytes.size() != 2 * count) throw nb::value_error("codes: wrong number of bytes");
    return codes_of(count, bytes, "codes");
}

// Returns a matrix of floats; None is an error.
Floats matrix_of(uint64_t rows, uint64_t columns, const Bytes& bytes, const char* name) {
    if (columns != 0 && rows > kMaxValues / columns) throw nb::value_error("rows and columns: too many");
    const Floats floats = floats_of(rows * columns, bytes, name);
    if (floats.data == nullptr && rows * columns != 0)
        throw nb::value_error((std::string(name) + ": none").c_str());
    return floats;
}

// Returns the positions that arrays of `count` elements hold, from `first` on.
Positions positions_of(const Lattice& lattice, std::optional<uint64_t> first, uint64_t count) {
    if (!first) return {0, lattice.count()};
    if (*first > lattice.count() || count > lattice.count() - *first)
        throw nb::value_error("first: positions beyond the tensor");
    return {*first, count};
}

// Float32 values as Python passes them: an array, a lattice and codes on it, or None.
class ValuesArgument {
   public:
    explicit ValuesArgument(nb::handle object)
        : lattice_(nb::isinstance<nb::tuple>(object) ? nb::cast<const Lattice*>(object[0]) : nullptr),
          bytes(lattice_ != nullptr ? nb::object(object[1]) : nb::borrow(object)) {}

    // Returns values for `count` positions of a tensor of this lattice's size.
    Values checked(const Lattice& lattice, uint64_t count, const char* name) const {
        Values out;
        if (lattice_ == nullptr) {
            out.floats = floats_of(count, bytes, name);
            return out;
        }
        if (lattice_->count() != lattice.count())
            throw nb::value_error((std::string(name) + ": a lattice of another size").c_str());
        out.lattice = lattice_, out.codes = required_codes(count, bytes);
        return out;
    }
    // Same without bfloat16, which second moments never have.
    Values checked_squares(const Lattice& lattice, uint64_t count) const {
        const Values out = checked(lattice, count, "squares");
        if (count != 0 && out.floats.bytes != 4) throw nb::value_error("squares: wrong number of bytes");
        return out;
    }

    const Lattice* lattice() const { return lattice_; }

   private:
    const Lattice* lattice_;

   public:
    const Bytes bytes;
};

// Throws if an output shares memory with another array of the call.
void check_overlap(const Bytes& output, std::initializer_list<const Bytes*> arrays) {
    for (const Bytes* array : arrays)
        if (overlap(output, *array)) throw nb::value_error("an array that is written shares memory with another one");
}

void predict_lattice(const Lattice& lattice, Output guesses, Output contexts, LatticeInput parent, LatticeInput squares,
                     Hasher* base, std::optional<uint64_t> first, unsigned threads) {
    const ValuesArgument parent_values(parent), square_values(squares);
    const Bytes guess_bytes(guesses, PyBUF_WRITABLE), context_bytes(contexts, PyBUF_WRITABLE);
    check_overlap(guess_bytes, {&parent_values.bytes, &square_values.bytes, &context_bytes});
    check_overlap(context_bytes, {&parent_values.bytes, &square_values.bytes});
    const Positions positions = positions_of(lattice, first, guess_bytes.size() / 2);
    const Known known{parent_values.checked(lattice, positions.count, "parent"),
                      square_values.checked_squares(lattice, positions.count)};
    auto* guess_data = array_of_size<int16_t>(positions.count, guess_bytes, "guesses");
    auto* context_data = array_of_size<uint8_t>(positions.count, context_bytes, "contexts");
    nb::gil_scoped_release release;
    lattice_predict(lattice, known, base, guess_data, context_data, positions, threads);
}

Tuple<Array, int, bool, bool> encode_lattice(const Lattice& lattice, Input codes, Output contexts, Output tokens,
                                             LatticeInput parent, LatticeInput squares, Input expected, Hasher* digest,
                                             Hasher* base, unsigned threads) {
    const ValuesArgument parent_values(parent), square_values(squares);
    const Bytes code_bytes(codes), expected_bytes(expected);
    const Bytes context_bytes(contexts, PyBUF_WRITABLE), token_bytes(tokens, PyBUF_WRITABLE);
    check_overlap(context_bytes,
                  {&code_bytes, &parent_values.bytes, &square_values.bytes, &expected_bytes, &token_bytes});
    check_overlap(token_bytes, {&code_bytes, &parent_values.bytes, &square_values.bytes, &expected_bytes});
    const Codes code_data = required_codes(lattice.count(), code_bytes);
    auto* context_data = array_of_size<uint8_t>(lattice.count(), context_bytes, "contexts");
    auto* token_data = array_of_size<uint8_t>(lattice.count(), token_bytes, "tokens");
    const Known known{parent_values.checked(lattice, lattice.count(), "parent"),
                      square_values.checked_squares(lattice, lattice.count())};
    const Floats expected_floats = floats_of(lattice.count(), expected_bytes, "expected");
    Differences differences;
    Buffer escapes;
    {
        nb::gil_scoped_release release;
        differences = lattice_encode(lattice, code_data, known, expected_floats, {digest, base}, context_data,
                                     token_data, threads);
        const auto* escape_data = reinterpret_cast<const uint8_t*>(differences.escapes.data());
        escapes.assign(escape_data, escape_data + 4 * differences.escapes.size());
    }
    return nb::make_tuple(array_of(std::move(escapes)), static_cast<int>(differences.largest_context),
                          differences.in_range, differences.same);
}

Tuple<int, bool> decode_lattice(const Lattice& lattice, Input tokens, Input contexts, Input escapes, Output guesses,
                                Output values, Output codes, LatticeInput squares, Hasher* digest,
                                std::optional<uint64_t> first, unsigned threads) {
    const ValuesArgument square_values(squares);
    const Bytes token_bytes(tokens), context_bytes(contexts), escape_bytes(escapes);
    const int writable = PyBUF_WRITABLE;
    const Bytes guess_bytes(guesses, writable), code_bytes(codes, writable), value_bytes(values, writable);
    const std::initializer_list<const Bytes*> sources = {&token_bytes, &context_bytes, &escape_bytes,
                                                         &square_values.bytes};
    for (const Bytes* output : {&guess_bytes, &code_bytes, &value_bytes}) check_overlap(*output, sources);
    check_overlap(guess_bytes, {&code_bytes, &value_bytes});
    check_overlap(code_bytes, {&value_bytes});
    const Positions positions = positions_of(lattice, first, guess_bytes.size() / 2);
    const auto* token_data = array_of_size<const uint8_t>(positions.count, token_bytes, "tokens");
    const auto* context_data = array_of_size<const uint8_t>(positions.count, context_bytes, "contexts");
    const size_t count = escape_bytes.size() / 4;
    const auto* escape_data = reinterpret_cast<const int32_t*>(escape_bytes.checked(4 * count, 4, "escapes"));
    const Values square_data = square_values.checked_squares(lattice, positions.count);
    auto* guess_data = array_of_size<int16_t>(positions.count, guess_bytes, "guesses");
    const Codes code_data = codes.is_none() ? Codes{} : required_codes(positions.count, code_bytes);
    const Decoded out{code_bytes.data(), code_data.bytes, optional_array<float>(positions.count, value_bytes, "values"),
                      digest};
    DecodeResult result;
    {
        nb::gil_scoped_release release;
        result = lattice_decode(lattice, token_data, context_data, escape_data, count, square_data, guess_data, out,
                                positions, threads);
    }
    return nb::make_tuple(result.escapes, result.narrow);
}

// A part as Python passes it: a lattice, its first position, room for codes of a byte, parent and squares.
class PartArgument {
   public:
    explicit PartArgument(nb::handle object)
        : lattice_(nb::cast<const Lattice*>(object[0])),
          first_(nb::cast<uint64_t>(object[1])),
          parent_(object[3]),
          squares_(object[4]),
          codes(nb::object(object[2]), PyBUF_WRITABLE) {}

    CodedPart checked() const {
        if (lattice_ == nullptr) throw nb::value_error("a part without a lattice");
        const Positions positions = positions_of(*lattice_, first_, codes.size());
        const Known known{parent_.checked(*lattice_, positions.count, "parent"),
                          squares_.checked_squares(*lattice_, positions.count)};
        check_overlap(codes, {&squares_.bytes});
        if (known.parent.codes.data != codes.data() || known.parent.codes.bytes != 1)
            check_overlap(codes, {&parent_.bytes});
        return {lattice_, known, positions, reinterpret_cast<int8_t*>(codes.data())};
    }

   private:
    const Lattice* lattice_;
    const uint64_t first_;
    const ValuesArgument parent_, squares_;

   public:
    const Bytes codes;
};

using WideCodesList = nb::typed<nb::list, std::optional<Array>>;

// Returns two-byte codes for the parts that need them and None for the others; in memory of the pool.
WideCodesList widened(const std::vector<CodedPart>& parts, const std::vector<WideCodes>& pieces) {
    std::vector<Buffer> wide(parts.size());
    {
        nb::gil_scoped_release release;
        for (const WideCodes& piece : pieces) {
            const CodedPart& part = parts[piece.part];
            Buffer& out = wide[piece.part];
            if (out.empty()) {
                out.resize(2 * part.positions.count);
                widen_codes(part.codes, part.positions.count, reinterpret_cast<int16_t*>(out.data()));
            }
            std::memcpy(out.data() + 2 * piece.start, piece.codes.data(), 2 * piece.codes.size());
        }
    }
    nb::list out;
    for (Buffer& codes : wide) {
        if (codes.empty())
            out.append(nb::none());
        else
            out.append(array_of(std::move(codes)));
    }
    return out;
}

WideCodesList decode_lattice_codes(const Model& model, Input side, Input coded, uint64_t count, size_t first,
                                   LatticeParts parts, size_t chunk, unsigned threads) {
    const Bytes side_bytes(side), coded_bytes(coded);
    std::vector<std::unique_ptr<PartArgument>> arguments;
    std::vector<CodedPart> checked;
    uint64_t here = 0;
    for (const nb::handle part : parts) {
        arguments.push_back(std::make_unique<PartArgument>(part));
        checked.push_back(arguments.back()->checked());
        check_overlap(arguments.back()->codes, {&side_bytes, &coded_bytes});
        here += checked.back().positions.count;
    }
    if (here == 0 || chunk == 0) throw nb::value_error("nothing to decode");
    if (model.tokens != Tokens::Codes || model.predictor != Predictor::Base)
        throw nb::value_error("model: of other codes than lattices have");
    Arrays predicted;
    predicted.base = side_bytes.data();  // in the place of what is made tile by tile
    check(model, predicted, false);
    const ChunkRange range = chunk_range_of(count, chunk, first, here);
    std::vector<WideCodes> wide;
    {
        nb::gil_scoped_release release;
        wide = lattice_decode_codes(checked, model, side_bytes.data(), side_bytes.size(), coded_bytes.data(),
                                    coded_bytes.size(), range, threads);
    }
    return widened(checked, wide);
}

void decode_values(const Lattice& lattice, Input codes, Output values, LatticeInput squares, Hasher* digest,
                   std::optional<uint64_t> first, unsigned threads) {
    const ValuesArgument square_values(squares);
    const Bytes code_bytes(codes), value_bytes(values, PyBUF_WRITABLE);
    check_overlap(value_bytes, {&code_bytes, &square_values.bytes});
    const Positions positions = positions_of(lattice, first, value_bytes.size() / 4);
    const Codes code_data = required_codes(positions.count, code_bytes);
    const Values square_data = square_values.checked_squares(lattice, positions.count);
    auto* value_data = array_of_size<float>(positions.count, value_bytes, "values");
    nb::gil_scoped_release release;
    lattice_values(lattice, code_data, square_data, value_data, digest, positions, threads);
}

// Returns runs after checking that they lie in the lattice's tensor.
Runs runs_of(const Lattice& lattice, uint64_t first, uint64_t length, uint64_t stride, uint64_t count) {
    const uint64_t size = lattice.count();
    const bool begins = length != 0 && length <= size && first <= size - length;
    const bool ends = count <= 1 || (begins && stride >= length && stride <= (size - length - first) / (count - 1));
    const bool fits = count == 0 || (begins && ends);
    if (!fits) throw nb::value_error("runs: positions beyond the tensor");
    return {first, length, stride, count};
}

void decode_run_values(const Lattice& lattice, Input codes, Output values, Input squares, uint64_t first,
                       uint64_t length, uint64_t stride, uint64_t count) {
    const Bytes code_bytes(codes), square_bytes(squares), value_bytes(values, PyBUF_WRITABLE);
    check_overlap(value_bytes, {&code_bytes, &square_bytes});
    const Runs runs = runs_of(lattice, first, length, stride, count);
    const uint64_t total = runs.length * runs.count;
    const Codes code_data = required_codes(lattice.count(), code_bytes);
    const auto* square_data = optional_array<const float>(total, square_bytes, "squares");
    auto* value_data = array_of_size<float>(total, value_bytes, "values");
    nb::gil_scoped_release release;
    lattice_run_values(lattice, code_data, {reinterpret_cast<const uint8_t*>(square_data), 4}, runs, value_data);
}

// Decodes runs of several tensors one after the other: of each a lattice, codes, and first, length, stride and count.
void decode_rows(const LatticeRuns& parts, Output values) {
    const Bytes value_bytes(values, PyBUF_WRITABLE);
    auto* out = reinterpret_cast<float*>(value_bytes.checked(value_bytes.size(), 4, "values"));
    uint64_t room = value_bytes.size() / 4;
    for (nb::handle part : parts) {
        const Lattice& lattice = *nb::cast<const Lattice*>(part[0], false);
        const Bytes code_bytes(part[1]);
        check_overlap(value_bytes, {&code_bytes});
        const auto number = [&](int index) { return nb::cast<uint64_t>(part[index]); };
        const Runs runs = runs_of(lattice, number(2), number(3), number(4), number(5));
        const uint64_t total = runs.length * runs.count;
        if (total > room) throw nb::value_error("values: too few");
        const Codes codes = required_codes(lattice.count(), code_bytes);
        nb::gil_scoped_release release;
        lattice_run_values(lattice, codes, {}, runs, out);
        out += total, room -= total;
    }
    if (room != 0) throw nb::value_error("values: too many");
}

bool starts_with(const Lattice& lattice, Input codes, Input values, uint64_t count) {
    const Bytes code_bytes(codes), value_bytes(values);
    const Codes code_data = required_codes(lattice.count(), code_bytes);
    const auto* floats = array_of_size<const float>(lattice.count(), value_bytes, "values");
    nb::gil_scoped_release release;
    return lattice_starts_with(lattice, code_data, floats, std::min(count, lattice.count()));
}

bool rounded_exponents(Input exponents, Input centers, int32_t allowed, Output out) {
    const Bytes own(exponents), center_bytes(centers), rounded(out, PyBUF_WRITABLE);
    const size_t count = own.size() / 2;
    if (allowed < 0 || allowed > 1 << 12) throw nb::value_error("allowed: expected 0 to 4096");
    return round_exponents(array_of_size<const int16_t>(count, own, "exponents"),
                           optional_array<const int16_t>(count, center_bytes, "centers"), count, allowed,
                           array_of_size<int16_t>(count, rounded, "out"));
}

// Returns the digest of arrays one after the other; of codes on a lattice, that of the values.
std::string digest_of(const nb::typed<nb::iterable, LatticeInput>& arrays) {
    Hasher hasher;
    for (nb::handle array : arrays) {
        const ValuesArgument values(array);
        const Lattice* lattice = values.lattice();
        const Codes codes = lattice == nullptr ? Codes{} : required_codes(lattice->count(), values.bytes);
        nb::gil_scoped_release release;
        if (lattice == nullptr)
            hasher.update(values.bytes.data(), values.bytes.size());
        else
            lattice_digest(*lattice, codes, hasher);
    }
    return hex_of(hasher.digest());
}

ErrorWeights error_weights_of(uint64_t count, const Bytes& slopes, const Bytes& squares) {
    return {floats_of(count, slopes, "slopes"), floats_of(count, squares, "squares")};
}

unsigned quantize_lattice(const Lattice& lattice, Input values, Output codes, const Lattice* seconds,
                          Input second_codes, Input previous, float hysteresis, unsigned threads) {
    const Bytes input_bytes(values), second_bytes(second_codes), previous_bytes(previous),
        code_bytes(codes, PyBUF_WRITABLE);
    check_overlap(code_bytes, {&input_bytes, &second_bytes, &previous_bytes});
    const Floats floats = floats_of(lattice.count(), input_bytes, "values");
    if (floats.data == nullptr && lattice.count() != 0) throw nb::value_error("values: none");
    CodedMoments moments;
    if (seconds != nullptr) {
        if (seconds->rows != lattice.rows || seconds->columns != lattice.columns)
            throw nb::value_error("seconds: a lattice of another shape");
        moments = {seconds, required_codes(lattice.count(), second_bytes)};
    }
    const Codes previous_data = codes_of(lattice.count(), previous_bytes, "previous");
    const Codes out = required_codes(lattice.count(), code_bytes);
    nb::gil_scoped_release release;
    return lattice_quantize(lattice, floats, moments, previous_data, hysteresis, code_bytes.data(), out.bytes,
                            threads);
}

Tuple<int, Tuple<double, double, double>> quantize_with_errors(const Lattice& lattice, Input values, Output codes,
                                                               Input slopes, Input squares, Input previous,
                                                               float hysteresis, unsigned threads) {
    const Bytes input_bytes(values), slope_bytes(slopes), square_bytes(squares), previous_bytes(previous),
        code_bytes(codes, PyBUF_WRITABLE);
    check_overlap(code_bytes, {&input_bytes, &slope_bytes, &square_bytes, &previous_bytes});
    const Floats floats = matrix_of(lattice.rows, lattice.columns, input_bytes, "values");
    const ErrorWeights weights = error_weights_of(lattice.count(), slope_bytes, square_bytes);
    const Codes previous_data = codes_of(lattice.count(), previous_bytes, "previous");
    const Codes out = required_codes(lattice.count(), code_bytes);
    ErrorSums sums;
    unsigned bytes = 0;
    {
        nb::gil_scoped_release release;
        bytes = lattice_quantize(lattice, floats, {}, previous_data, hysteresis, code_bytes.data(), out.bytes, threads,
                                 weights, &sums);
    }
    return nb::make_tuple(bytes, nb::make_tuple(sums.slope, sums.curvature, sums.squares));
}

bool quantize_feedback(const Lattice& lattice, Input values, Input factor, Output codes, unsigned threads) {
    const Bytes input_bytes(values), factor_bytes(factor), code_bytes(codes, PyBUF_WRITABLE);
    check_overlap(code_bytes, {&input_bytes, &factor_bytes});
    const Floats floats = matrix_of(lattice.rows, lattice.columns, input_bytes, "values");
    const Floats factors = matrix_of(lattice.columns, lattice.columns, factor_bytes, "factor");
    if (factors.bytes != 4) throw nb::value_error("factor: expected float32");
    auto* const out = array_of_size<int16_t>(lattice.count(), code_bytes, "codes");
    nb::gil_scoped_release release;
    return quantize_with_feedback(lattice, floats, reinterpret_cast<const float*>(factors.data), out, threads);
}

Tuple<double, double, double> sum_errors(const Lattice& lattice, Input codes, Input values, Input slopes, Input squares,
                                         unsigned threads) {
    const Bytes code_bytes(codes), value_bytes(values), slope_bytes(slopes), square_bytes(squares);
    const Codes code_data = required_codes(lattice.count(), code_bytes);
    const Floats value_floats = matrix_of(lattice.rows, lattice.columns, value_bytes, "values");
    const ErrorWeights weights = error_weights_of(lattice.count(), slope_bytes, square_bytes);
    ErrorSums sums;
    {
        nb::gil_scoped_release release;
        sums = quantization_error_sums(lattice, code_data, value_floats, weights, threads);
    }
    return nb::make_tuple(sums.slope, sums.curvature, sums.squares);
}

// Returns for both earlier times the squared movement, that times the movement of the points before, and what is written
// by threshold.
DoubleArray sum_movement(const Lattice& lattice, Input parent, Input first_codes, Input weight, Input start,
                         Input original, uint64_t first, uint64_t length, uint64_t stride, uint64_t count,
                         float max_hysteresis, size_t levels) {
    const Bytes parent_bytes(parent), code_bytes(first_codes), weight_bytes(weight);
    const Bytes start_bytes(start), original_bytes(original);
    const Runs runs = runs_of(lattice, first, length, stride, count);
    const Codes parent_data = required_codes(lattice.count(), parent_bytes);
    const Codes first_data = required_codes(lattice.count(), code_bytes);
    const Floats weight_floats = matrix_of(count, length, weight_bytes, "weight");
    const std::array<Floats, 2> earlier = {matrix_of(count, length, start_bytes, "start"),
                                           matrix_of(count, length, original_bytes, "original")};
    std::vector<double> out;
    {
        nb::gil_scoped_release release;
        for (const MovementSums& sums : movement_sums(lattice, runs, parent_data, first_data, weight_floats, earlier,
                                                      max_hysteresis, levels)) {
            out.insert(out.end(), {sums.squared, sums.before});
            out.insert(out.end(), sums.written.begin(), sums.written.end());
        }
    }
    return array_of(std::move(out));
}

bool are_near_points(const Lattice& lattice, Input codes, Input values, uint64_t first, uint64_t length,
                     uint64_t stride, uint64_t count, float max_steps) {
    const Bytes code_bytes(codes), value_bytes(values);
    const Runs runs = runs_of(lattice, first, length, stride, count);
    const Codes code_data = required_codes(lattice.count(), code_bytes);
    const Floats value_floats = matrix_of(count, length, value_bytes, "values");
    nb::gil_scoped_release release;
    return near_points(lattice, runs, code_data, value_floats, max_steps);
}

void bind_lattice(nb::module_& m) {
    nb::class_<Lattice>(m, "Lattice")
        .def(
            "__init__",
            [](Lattice* self, Input rows, Input columns, uint64_t height, uint64_t width, bool powers,
               int32_t step, uint32_t seed) {
                new (self) Lattice(powers, exponents_of(rows, "rows"), exponents_of(columns, "columns"), height, width,
                                   step, seed);
            },
            "rows"_a, "columns"_a, "height"_a, "width"_a, nb::kw_only(), "powers"_a = false, "step"_a = 1,
            "seed"_a = 0)
        .def(
            "with_gain",
            [](const Lattice& lattice, Input origin, float gain) {
                const Bytes origin_bytes(origin);
                return lattice.with_gain(required_codes(lattice.count(), origin_bytes), gain);
            },
            "origin"_a, "gain"_a, nb::keep_alive<0, 2>())
        .def_prop_ro("has_normal_steps", &Lattice::has_normal_steps);
    m.def("lattice_predict", predict_lattice, "lattice"_a, "guesses"_a, "contexts"_a, nb::kw_only(),
          "parent"_a.none() = nb::none(), "squares"_a.none() = nb::none(), "base"_a.none() = nb::none(),
          "first"_a.none() = nb::none(), "threads"_a = 1);
    m.def("lattice_encode", encode_lattice, "lattice"_a, "codes"_a, "contexts"_a, "tokens"_a, nb::kw_only(),
          "parent"_a.none() = nb::none(), "squares"_a.none() = nb::none(), "expected"_a.none() = nb::none(),
          "digest"_a.none() = nb::none(), "base"_a.none() = nb::none(), "threads"_a = 1);
    m.def("lattice_decode", decode_lattice, "lattice"_a, "tokens"_a, "contexts"_a, "escapes"_a, "guesses"_a,
          "values"_a.none(), nb::kw_only(), "codes"_a.none() = nb::none(), "squares"_a.none() = nb::none(),
          "digest"_a.none() = nb::none(), "first"_a.none() = nb::none(), "threads"_a = 1);
    m.def("lattice_decode_codes", decode_lattice_codes, "model"_a, "side"_a, "coded"_a, "count"_a, "first"_a,
          "parts"_a, nb::kw_only(), "chunk"_a = kChunk, "threads"_a = 1);
    m.def("lattice_values", decode_values, "lattice"_a, "codes"_a, "values"_a, nb::kw_only(),
          "squares"_a.none() = nb::none(), "digest"_a.none() = nb::none(), "first"_a.none() = nb::none(), "threads"_a = 1);
    m.def("lattice_run_values", decode_run_values, "lattice"_a, "codes"_a, "values"_a, nb::kw_only(),
          "squares"_a.none() = nb::none(), "first"_a, "length"_a, "stride"_a, "count"_a);
    m.def("digest", digest_of, "arrays"_a);
    m.def("lattice_rows", decode_rows, "parts"_a, "values"_a);
    m.def("lattice_starts_with", starts_with, "lattice"_a, "codes"_a, "values"_a, "count"_a);
    m.def("round_exponents", rounded_exponents, "exponents"_a, "centers"_a.none(), "allowed"_a, "out"_a);
    m.def("lattice_quantize", quantize_lattice, "lattice"_a, "values"_a, "codes"_a, nb::kw_only(),
          "seconds"_a.none() = nb::none(), "second_codes"_a.none() = nb::none(), "previous"_a.none() = nb::none(),
          "hysteresis"_a = 0.5f, "threads"_a = 1);
    m.def("lattice_quantize_with_errors", quantize_with_errors, "lattice"_a, "values"_a, "codes"_a, nb::kw_only(),
          "slopes"_a.none() = nb::none(), "squares"_a.none() = nb::none(), "previous"_a.none() = nb::none(),
          "hysteresis"_a = 0.5f, "threads"_a = 1);
    m.def("quantize_with_feedback", quantize_feedback, "lattice"_a, "values"_a, "factor"_a, "codes"_a, nb::kw_only(),
          "threads"_a = 1);
    m.def("movement_sums", sum_movement, "lattice"_a, "parent"_a, "first_codes"_a, "weight"_a, "start"_a,
          "original"_a, "first"_a, "length"_a, "stride"_a, "count"_a, nb::kw_only(), "max_hysteresis"_a, "levels"_a);
    m.def("near_points", are_near_points, "lattice"_a, "codes"_a, "values"_a, "first"_a, "length"_a, "stride"_a,
          "count"_a, nb::kw_only(), "max_steps"_a);
    m.def("quantization_error_sums", sum_errors, "lattice"_a, "codes"_a, "values"_a, nb::kw_only(),
          "slopes"_a.none() = nb::none(), "squares"_a.none() = nb::none(), "threads"_a = 1);
}

void bind_progress(nb::module_& m) {
    m.def(
        "progress_sums",
        [](Input weight, Input parent_weight, Input stored, Input parent_stored, uint64_t count,
           unsigned threads) -> Tuple<double, double, double, double> {
            const Bytes weight_bytes(weight), parent_weight_bytes(parent_weight);
            const Bytes stored_bytes(stored), parent_stored_bytes(parent_stored);
            const Floats arrays[] = {
                floats_of(count, weight_bytes, "weight"), floats_of(count, parent_weight_bytes, "parent_weight"),
                floats_of(count, stored_bytes, "stored"), floats_of(count, parent_stored_bytes, "parent_stored")};
            ProgressSums sums;
            {
                nb::gil_scoped_release release;
                sums = progress_sums(arrays[0], arrays[1], arrays[2], arrays[3], count, threads);
            }
            return nb::make_tuple(sums.movement, sums.stored_movement, sums.weight, sums.stored_weight);
        },
        "weight"_a, "parent_weight"_a, "stored"_a, "parent_stored"_a, "count"_a, nb::kw_only(), "threads"_a = 1);
}

Tuple<bool, bool, DoubleArray> sum_second_moments(Input seconds, uint64_t rows, uint64_t columns, Input firsts,
                                                  bool by_column, unsigned threads) {
    const Bytes second_bytes(seconds), first_bytes(firsts);
    const Floats second_floats = matrix_of(rows, columns, second_bytes, "seconds");
    const Floats first_floats = floats_of(rows * columns, first_bytes, "firsts");
    std::vector<double> all;
    bool finite = false, negative = false;
    {
        nb::gil_scoped_release release;
        const SecondMomentSums sums =
            second_moment_sums(second_floats, first_floats, rows, columns, by_column, threads);
        finite = sums.finite, negative = sums.negative;
        for (const auto* part : {&sums.row_logs, &sums.column_logs, &sums.row_counts, &sums.column_counts,
                                 &sums.row_sums, &sums.column_sums})
            all.insert(all.end(), part->begin(), part->end());
    }
    return nb::make_tuple(finite, negative, array_of(std::move(all)));
}

LogSums log_sums_of(const Bytes& logs, const Bytes& counts) {
    const size_t size = logs.size() / 8;
    return {array_of_size<const double>(size, logs, "logs"), array_of_size<const double>(size, counts, "counts"),
            size};
}

void exponents_of_seconds(Input row_logs, Input row_counts, Input column_logs, Input column_counts, int32_t limit,
                          Output rows, Output columns) {
    const Bytes arrays[] = {Bytes(row_logs), Bytes(row_counts), Bytes(column_logs), Bytes(column_counts)};
    const Bytes row_bytes(rows, PyBUF_WRITABLE), column_bytes(columns, PyBUF_WRITABLE);
    const LogSums by_row = log_sums_of(arrays[0], arrays[1]), by_column = log_sums_of(arrays[2], arrays[3]);
    const size_t row_count = row_bytes.size() / 2, column_count = column_bytes.size() / 2;
    if ((row_count > 1 && row_count != by_row.size) || (column_count > 1 && column_count != by_column.size))
        throw nb::value_error("rows and columns: expected one exponent, or one for each sum");
    second_exponents(by_row, by_column, limit, array_of_size<int16_t>(row_count, row_bytes, "rows"), row_count,
                     array_of_size<int16_t>(column_count, column_bytes, "columns"), column_count);
}

DoubleArray quantize_seconds(const Lattice& lattice, uint64_t rows, Input seconds, Output codes, Input firsts,
                             float dead_zone, const Lattice* earlier, Input earlier_codes, float above, float below,
                             unsigned threads) {
    const Bytes second_bytes(seconds), first_bytes(firsts), code_bytes(codes, PyBUF_WRITABLE);
    const Bytes earlier_bytes(earlier_codes);
    check_overlap(code_bytes, {&second_bytes, &first_bytes, &earlier_bytes});
    const uint64_t count = lattice.count();
    if (rows != lattice.rows && rows != lattice.columns) throw nb::value_error("rows: expected those of the lattice");
    const Floats second_floats = matrix_of(1, count, second_bytes, "seconds");
    const Floats first_floats = floats_of(count, first_bytes, "firsts");
    auto* code_data = array_of_size<int8_t>(count, code_bytes, "codes");
    const EarlierPowers before{
        earlier, earlier == nullptr ? nullptr : array_of_size<const int8_t>(count, earlier_bytes, "earlier codes")};
    std::vector<double> sums;
    {
        nb::gil_scoped_release release;
        sums = quantize_second_moments(lattice, rows, second_floats, first_floats, before, {dead_zone, above, below},
                                       code_data, threads);
    }
    return array_of(std::move(sums));
}

void bind_statistics(nb::module_& m) {
    m.def("second_moment_sums", sum_second_moments, "seconds"_a, "rows"_a, "columns"_a, nb::kw_only(),
          "firsts"_a.none() = nb::none(), "by_column"_a = true, "threads"_a = 1);
    m.def("second_exponents", exponents_of_seconds, "row_logs"_a, "row_counts"_a, "column_logs"_a,
          "column_counts"_a, "limit"_a, "rows"_a, "columns"_a);
    m.def("quantize_second_moments", quantize_seconds, "lattice"_a, "rows"_a, "seconds"_a, "codes"_a,
          nb::kw_only(), "firsts"_a.none() = nb::none(), "dead_zone"_a, "earlier"_a.none() = nb::none(),
          "earlier_codes"_a.none() = nb::none(), "above"_a = 0.0f, "below"_a = 0.0f, "threads"_a = 1);
    m.def(
        "value_sums",
        [](Input values, uint64_t count, unsigned threads) -> Tuple<double, double, double> {
            const Bytes value_bytes(values);
            const Floats floats = matrix_of(1, count, value_bytes, "values");
            ValueSums sums;
            {
                nb::gil_scoped_release release;
                sums = value_sums(floats, count, threads);
            }
            return nb::make_tuple(sums.max_magnitude, sums.mean, sums.squared_deviations);
        },
        "values"_a, "count"_a, nb::kw_only(), "threads"_a = 1);
}

}  // namespace

void bind_quantizers(nb::module_& m) {
    bind_progress(m);
    bind_cyclic(m);
    bind_kmeans(m);
    bind_lattice(m);
    bind_statistics(m);
}

}  // namespace shrinkpoint
