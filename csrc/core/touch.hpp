// Memory that is touched before it is needed.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "core/memory.hpp"

namespace quire {

// A thread, which sleeps most of the time, gives pages to memory, whose contents stay: who writes
// there later waits for none of them. It does nothing where the system cannot.
class TouchAhead {
   public:
    TouchAhead() = default;

    // Returns at once; pieces are touched in the order of the calls. The memory stays mapped for as
    // long as this object lives.
    void touch(std::byte* memory, size_t size);

    // No memory is touched any more when this returns, after some milliseconds.
    ~TouchAhead();

    TouchAhead(const TouchAhead&) = delete;
    TouchAhead& operator=(const TouchAhead&) = delete;

   private:
    struct Piece {
        std::byte* start;
        size_t size;
    };

    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Piece> waiting_;
    bool ends_ = false;
    std::thread thread_;
};

// Has a thread touch the first page of the memory, a huge one where it has those; the contents stay,
// and the thread keeps the memory until then. Further calls wait for their turn in the same thread.
void touch_start(std::shared_ptr<Memory> memory);

}  // namespace quire
