// Memory that is touched before it is needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "core/memory.hpp"

namespace quire {

// A thread, which sleeps most of the time, gives pages to memory, whose contents stay: who writes
// there later waits for none of them. It does nothing where the system cannot.
class TouchAhead {
 public:
    // Returns at once. The memory stays mapped for as long as this object lives.
    TouchAhead(std::byte* memory, size_t size);

    // The memory is not touched any more when this returns, after some milliseconds.
    ~TouchAhead();

    TouchAhead(const TouchAhead&) = delete;
    TouchAhead& operator=(const TouchAhead&) = delete;

 private:
    void run(std::byte* start, size_t size);

    std::atomic<bool> ends_{false};
    std::thread thread_;
};

// Has a thread touch the first page of the memory, a huge one where it has those; the contents stay,
// and the thread keeps the memory until then. Further calls wait for their turn in the same thread.
void touch_start(std::shared_ptr<Memory> memory);

}  // namespace quire
