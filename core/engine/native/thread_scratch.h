// Aligned memory that a thread keeps for its next call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

class Scratch {
public:
    // What was there before is gone. Without memory the process ends: nothing can be thrown through a job.
    void* take(size_t bytes) {
        if (bytes > size_) {
            size_ = (bytes + 63) / 64 * 64;
            memory_.reset(std::aligned_alloc(64, size_));
            if (memory_ == nullptr) std::abort();
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    size_t size_ = 0;
    std::unique_ptr<void, Free> memory_;
};
