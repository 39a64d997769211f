// What the bindings share: buffers of Python borrowed, and vectors handed over to it.
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

// Any contiguous buffer, borrowed for the length of a call; None is an empty one.
class Bytes {
   public:
    explicit Bytes(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (object.is_none()) return;
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
        held_ = true;
    }
    ~Bytes() {
        if (held_) PyBuffer_Release(&view_);
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    uint8_t* data() const { return held_ ? static_cast<uint8_t*>(view_.buf) : nullptr; }
    size_t size() const { return held_ ? static_cast<size_t>(view_.len) : 0; }

    // The data, checked to be `size` bytes that may be read as words of `align`; null for None.
    uint8_t* checked(size_t size, size_t align, const char* name) const {
        if (!held_) return nullptr;
        if (this->size() != size) throw nb::value_error((std::string(name) + ": wrong number of bytes").c_str());
        if (reinterpret_cast<uintptr_t>(data()) % align != 0)
            throw nb::value_error((std::string(name) + ": not aligned").c_str());
        return data();
    }

   private:
    Py_buffer view_{};
    bool held_ = false;
};

using Array = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// Hands a vector over to Python without copying it.
inline Array array_of(Buffer&& data) {
    auto* owned = new Buffer(std::move(data));
    const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
    return Array(owned->data(), {owned->size()}, owner);
}

struct ChunkRange;

// The chunks from `first` on that `here` values of `count` fill: whole ones, but for the last of all.
ChunkRange chunk_range_of(uint64_t count, size_t chunk, size_t first, uint64_t here);

// Adds cyclic_encode, cyclic_decode, kmeans, kmeans_plus_plus, Lattice and what takes one.
void bind_quantizers(nb::module_& m);
// What crosses a wire: ranges, blocks, indices.
void bind_wire_uniform(nb::module_& m);
void bind_wire_blocks(nb::module_& m);
void bind_wire_sparse(nb::module_& m);

}  // namespace shrinkpoint
