#include "base/buffer_pool.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>

#include <pthread.h>

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
    // A child forked while another thread holds the mutex would wait for it forever.
    void hold() { mutex_.lock(); }
    void release() { mutex_.unlock(); }

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

    // Keeps a block and returns true, or returns false: then the caller must free the block.
    bool give(Header* header) {
        const std::lock_guard lock(mutex_);
        if (header->size > kMaxPooled) return false;
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

// Allocates a multiple of `unit` bytes, aligned to `unit`.
void* allocate_in(size_t unit, size_t size) { return std::aligned_alloc(unit, (size + unit - 1) / unit * unit); }

#if defined(__linux__)
constexpr size_t kLargePage = size_t{1} << 21;
constexpr auto kSlowPage = std::chrono::milliseconds(1);  // a large page is cleared in a fourth of that
constexpr int kSmallPageBlocks = 64;

std::atomic<int> small_page_blocks{0};  // number of blocks that still get small pages

// Asks for large pages if the first one is fast; the kernel may refuse. A hypervisor that reclaimed free memory returns
// it with a fault for every 4 KiB. Large pages come from memory that was free for long and then cost many times what
// small pages cost, which come from memory that was in use a moment ago.
void advise_large_pages(void* block, size_t size) {
    if (small_page_blocks.load(std::memory_order_relaxed) > 0) {
        small_page_blocks.fetch_sub(1, std::memory_order_relaxed);
        return;
    }
    madvise(block, kLargePage, MADV_HUGEPAGE);
    const auto start = std::chrono::steady_clock::now();
    *static_cast<volatile char*>(block) = 0;
    if (std::chrono::steady_clock::now() - start > kSlowPage)
        small_page_blocks.store(kSmallPageBlocks, std::memory_order_relaxed);
    else  // not for a last page that would be almost unused
        madvise(block, size / kLargePage * kLargePage, MADV_HUGEPAGE);
}
#endif

void* allocate(size_t size) {
#if defined(__linux__)
    if (size >= 2 * kLargePage) {
        void* const block = allocate_in(kLargePage, size);
        if (block != nullptr) advise_large_pages(block, size);
        return block;
    }
#endif
    return allocate_in(alignof(Header), size);
}

Pool& pool() {
    static Pool* const one = [] {
        pthread_atfork([] { pool().hold(); }, [] { pool().release(); }, [] { pool().release(); });
        return new Pool;  // never destroyed: blocks may come back while the process ends
    }();
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
