// A vector for bytes that are written before they are read: it does not clear what it allocates, and takes large blocks
// from the pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer_pool.hpp"

namespace shrinkpoint {

template <typename T>
struct UninitializedAllocator : std::allocator<T> {
    T* allocate(size_t count) {
        if (count * sizeof(T) < kPooledFrom) return std::allocator<T>::allocate(count);
        return static_cast<T*>(pool_take(count * sizeof(T)));
    }
    void deallocate(T* block, size_t count) noexcept {
        if (count * sizeof(T) < kPooledFrom) return std::allocator<T>::deallocate(block, count);
        pool_give(block);
    }
    template <typename U>
    struct rebind {
        using other = UninitializedAllocator<U>;
    };
    UninitializedAllocator() = default;
    template <typename U>
    UninitializedAllocator(const UninitializedAllocator<U>&) noexcept {}
    template <typename U, typename... Arguments>
    void construct(U* place, Arguments&&... arguments) {
        if constexpr (sizeof...(Arguments) == 0)
            ::new (static_cast<void*>(place)) U;
        else
            ::new (static_cast<void*>(place)) U(std::forward<Arguments>(arguments)...);
    }
};

using Buffer = std::vector<uint8_t, UninitializedAllocator<uint8_t>>;

}  // namespace shrinkpoint
