// A digest over pieces that several threads make: each is added in its turn.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace shrinkpoint {

// Threads that take pieces in their order, and each do one thing in that order, too. One that fails lets all others go.
class Turns {
 public:
    // Calls `work` once all pieces before this one have had their turn; not at all once one has failed.
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
