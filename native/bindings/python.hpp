// Helpers of the bindings: borrowed Python buffers, vectors given to Python, and the types in _native.pyi.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/buffer.hpp"

namespace shrinkpoint {

namespace nb = nanobind;

// A contiguous buffer, or the memory of a tensor, borrowed while a call lasts. None is an empty buffer.
class Bytes {
   public:
    explicit Bytes(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (object.is_none() || borrow_tensor(object, flags)) return;
        get_buffer(object, flags);
    }
    ~Bytes() {
        if (held_) PyBuffer_Release(&view_);
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

    // Returns the data after checking that it has `size` bytes and can be read as words of `align` bytes; null for
    // None.
    uint8_t* checked(size_t size, size_t align, const char* name) const {
        if (!present_) return nullptr;
        if (this->size() != size) throw nb::value_error((std::string(name) + ": wrong number of bytes").c_str());
        if (reinterpret_cast<uintptr_t>(data()) % align != 0)
            throw nb::value_error((std::string(name) + ": not aligned").c_str());
        return data();
    }

   private:
    void get_buffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
        data_ = static_cast<uint8_t*>(view_.buf), size_ = static_cast<size_t>(view_.len);
        held_ = true, present_ = true;
    }
    // Borrows a tensor of torch, a contiguous one in host memory by its address: `Tensor.numpy` takes longer than many
    // a call here. Of another one that is read, a copy is borrowed. False: it is no tensor.
    bool borrow_tensor(nb::handle object, int flags);

    Py_buffer view_{};
    nb::object copy_;
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
    bool held_ = false, present_ = false;
};

using Array = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// Gives a vector to Python without copying it.
inline Array array_of(Buffer&& data) {
    auto* owned = new Buffer(std::move(data));
    const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
    return Array(owned->data(), {owned->size()}, owner);
}

// Types of arguments and results in _native.pyi, which nanobind's stubgen writes from the built module;
// stub_patterns.txt defines their names. Every object passes here, None as well: Bytes rejects objects without a
// buffer, or with one that cannot be written.
inline bool is_any(PyObject*) { return true; }

class Input : public nb::object {
    NB_OBJECT(Input, nb::object, "Buffer", is_any)
};
class Output : public nb::object {
    NB_OBJECT(Output, nb::object, "Bytes", is_any)
};
class LatticeInput : public nb::object {
    NB_OBJECT(LatticeInput, nb::object, "LatticeValues", is_any)
};
class LatticeParts : public nb::list {
    NB_OBJECT(LatticeParts, nb::list, "list[LatticePart]", PyList_Check)
};
class LatticeRuns : public nb::list {
    NB_OBJECT(LatticeRuns, nb::list, "list[LatticeRun]", PyList_Check)
};
template <typename... Types>
using Tuple = nb::typed<nb::tuple, Types...>;

struct ChunkRange;
struct Digest128;

// Returns a digest in hex.
std::string hex_of(const Digest128& digest);

// Returns the chunks that `here` values fill, from chunk `first` of `count` values on. All but the last of all must be
// whole.
ChunkRange chunk_range_of(uint64_t count, size_t chunk, size_t first, uint64_t here);

// Binds cyclic differences, k-means, lattices and statistics.
void bind_quantizers(nb::module_& m);
// Bind the messages of the wire: grids, blocks, indices, steps.
void bind_wire_uniform(nb::module_& m);
void bind_wire_blocks(nb::module_& m);
void bind_wire_sparse(nb::module_& m);
void bind_wire_steps(nb::module_& m);

}  // namespace shrinkpoint
