#include "core/touch.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#endif

namespace quire {

#if defined(__linux__)

namespace {

constexpr size_t kPiece = size_t(2) << 20;
constexpr size_t kPage = 4096;
// A piece takes about 1 ms. A low priority would do instead, but a process that is killed ends only
// with its last thread, which must not wait for the processor then.
constexpr std::chrono::milliseconds kPause(9);

}  // namespace

TouchAhead::TouchAhead(std::byte* memory, size_t size) {
    const size_t skip = (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage;
    if (size < skip + kPage) return;
    try {
        thread_ = std::thread(&TouchAhead::run, this, memory + skip, (size - skip) / kPage * kPage);
    } catch (const std::system_error&) {  // no more threads: who writes waits for the pages
    }
}

void TouchAhead::run(std::byte* start, size_t size) {
    for (size_t at = 0; at < size && !ends_; at += kPiece) {
        if (madvise(start + at, std::min(kPiece, size - at), MADV_POPULATE_WRITE) != 0) return;
        std::this_thread::sleep_for(kPause);
    }
}

#else

TouchAhead::TouchAhead(std::byte*, size_t) {}

void TouchAhead::run(std::byte*, size_t) {}

#endif

namespace {

// Memory whose first page is to be touched, and whether a thread does it.
struct Starts {
    std::mutex mutex;
    std::deque<std::shared_ptr<Memory>> waiting;
    bool is_running = false;

    void run() {
        std::unique_lock lock(mutex);
        while (!waiting.empty()) {
            std::shared_ptr<Memory> memory = std::move(waiting.front());
            waiting.pop_front();
            lock.unlock();
            // a call that populates memory holds up whoever maps some; others may write beside this
            __atomic_fetch_or(reinterpret_cast<unsigned char*>(memory->data()), 0, __ATOMIC_RELAXED);
            memory.reset();
            lock.lock();
        }
        is_running = false;
    }
};

}  // namespace

void touch_start(std::shared_ptr<Memory> memory) {
    static Starts& starts = *new Starts;  // never deleted: the process may end before the thread
    if (!memory->is_mapped()) return;  // smaller memory was cleared by its allocation
    std::lock_guard lock(starts.mutex);
    starts.waiting.push_back(std::move(memory));
    if (starts.is_running) return;
    try {
        std::thread([] { starts.run(); }).detach();  // which waits for the lock
        starts.is_running = true;
    } catch (const std::system_error&) {  // no more threads: the first request waits for the pages
        starts.waiting.clear();
    }
}

TouchAhead::~TouchAhead() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
}

}  // namespace quire
