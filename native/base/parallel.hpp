// Runs work over chunks 0..count-1 on several threads and passes on the first exception. Threads are started by each
// call.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace shrinkpoint {

inline size_t chunk_count(uint64_t count, size_t chunk) { return static_cast<size_t>((count + chunk - 1) / chunk); }

struct Span {
    uint64_t start;
    size_t count;
};

// The positions of chunk `index`: `length` of them, or fewer at the end of `count`.
inline Span span_of(size_t index, uint64_t count, size_t chunk, size_t length) {
    const uint64_t start = static_cast<uint64_t>(index) * chunk;
    return {start, static_cast<size_t>(std::min<uint64_t>(length, count - start))};
}

class WorkQueue {
   public:
    explicit WorkQueue(size_t count) : count_(count) {}
    // Takes the next index; false when none is left.
    bool take(size_t& index) {
        index = next_++;
        return index < count_;
    }
    void stop() { next_ = count_; }

   private:
    const size_t count_;
    std::atomic<size_t> next_{0};
};

// Runs `work(indices)` once on each thread. The work takes indices until none is left, so it can keep its buffers for
// all of them.
template <typename Work>
void parallel(size_t count, unsigned threads, Work work) {
    WorkQueue indices(count);
    std::exception_ptr error;
    std::mutex mutex;
    const auto run = [&] {
        try {
            work(indices);
        } catch (...) {
            const std::lock_guard lock(mutex);
            if (!error) error = std::current_exception();
            indices.stop();
        }
    };
    std::vector<std::thread> pool;
    const size_t others = std::min<size_t>(threads, count);
    pool.reserve(others);
    for (size_t t = 1; t < others; ++t) {
        try {
            pool.emplace_back(run);
        } catch (const std::system_error&) {  // no more threads: those that run do all the work
            break;
        }
    }
    run();
    for (std::thread& thread : pool) thread.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace shrinkpoint
