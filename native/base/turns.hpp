// Orders what several threads do with pieces that they make in parallel, such as updating one digest.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace shrinkpoint {

// Each thread takes pieces in ascending order and waits for the turn of each. When one thread fails, all others
// continue without waiting.
class Turns {
 public:
    // Calls `work` after all earlier pieces have had their turn. Skips it once a piece has failed.
    template <typename Work>
    void take(size_t piece, Work work) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return next_ == piece || failed_; });
        if (failed_) return;
        lock.unlock();
        work();
        lock.lock();
        ++next_;
        changed_.notify_all();
    }
    void fail() {
        const std::lock_guard lock(mutex_);
        failed_ = true;
        changed_.notify_all();
    }

 private:
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t next_ = 0;
    bool failed_ = false;
};

}  // namespace shrinkpoint
