#include "buffer_pool.hpp"

#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace shrinkpoint {

namespace {

struct alignas(64) Header {
    size_t size;
};

class Pool {
   public:
    void* take(size_t size) {
        const std::lock_guard lock(mutex_);
        for (auto it = free_.begin(); it != free_.end(); ++it) {
            if ((*it)->size < size || (*it)->size > 2 * size) continue;
            Header* header = *it;
            kept_ -= header->size;
            free_.erase(it);
            return header + 1;
        }
        return nullptr;
    }

    // Keeps a block; true unless the caller must free it.
    bool give(Header* header) {
        const std::lock_guard lock(mutex_);
        if (header->size > kPoolBound / 2) return false;
        free_.push_back(header);
        kept_ += header->size;
        while (kept_ > kPoolBound) {
            kept_ -= free_.front()->size;
            std::free(free_.front());
            free_.pop_front();
        }
        return true;
    }

   private:
    std::mutex mutex_;
    std::deque<Header*> free_;  // oldest first
    size_t kept_ = 0;
};

// A multiple of `unit` bytes, aligned to it.
void* allocate_in(size_t unit, size_t size) { return std::aligned_alloc(unit, (size + unit - 1) / unit * unit); }

void* allocate(size_t size) {
#if defined(__linux__)
    constexpr size_t kLargePage = size_t{1} << 21;
    if (size >= 2 * kLargePage) {
        void* const block = allocate_in(kLargePage, size);
        // A wish: whether it is granted changes nothing. Not for a last page that would be almost unused.
        if (block != nullptr) madvise(block, size / kLargePage * kLargePage, MADV_HUGEPAGE);
        return block;
    }
#endif
    return allocate_in(alignof(Header), size);
}

Pool& pool() {
    static Pool* const one = new Pool;  // never destroyed: blocks may come back while the process ends
    return *one;
}

}  // namespace

void* pool_take(size_t size) {
    if (void* block = pool().take(size)) return block;
    auto* header = static_cast<Header*>(allocate(sizeof(Header) + size));
    if (header == nullptr) throw std::bad_alloc();
    header->size = size;
    return header + 1;
}

void pool_give(void* block) noexcept {
    Header* header = static_cast<Header*>(block) - 1;
    try {
        if (pool().give(header)) return;
    } catch (...) {  // no memory for the list
    }
    std::free(header);
}

}  // namespace shrinkpoint
