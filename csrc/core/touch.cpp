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

namespace {

constexpr size_t kPiece = size_t(2) << 20;
constexpr size_t kPage = 4096;
// A tenth of a core, as a piece takes from 1 ms to 4, where the host of a virtual machine has to
// find the memory. A low priority would do instead, but a process that is killed ends only with its
// last thread, which must not wait for the processor then.
constexpr int kRest = 9;
constexpr std::chrono::milliseconds kLongestRest(100);

#if defined(__linux__)
bool populate(std::byte* start, size_t size) {
    return madvise(start, size, MADV_POPULATE_WRITE) == 0;
}
#else
bool populate(std::byte*, size_t) { return false; }
#endif

}  // namespace

void TouchAhead::touch(std::byte* memory, size_t size) {
    const size_t skip = (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage;
    if (size < skip + kPage) return;
    std::lock_guard lock(mutex_);
    if (ends_) return;
    waiting_.push_back({memory + skip, (size - skip) / kPage * kPage});
    changed_.notify_one();
    if (thread_.joinable()) return;
    try {
        thread_ = std::thread(&TouchAhead::run, this);
    } catch (const std::system_error&) {  // no more threads: who writes waits for the pages
    }
}

void TouchAhead::run() {
    using Clock = std::chrono::steady_clock;
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
        if (ends_) return;
        Piece& next = waiting_.front();
        const Piece piece{next.start, std::min(kPiece, next.size)};
        next = {next.start + piece.size, next.size - piece.size};
        if (next.size == 0) waiting_.pop_front();
        lock.unlock();
        const auto began = Clock::now();
        const bool is_done = populate(piece.start, piece.size);
        const auto rest = std::min<Clock::duration>(kRest * (Clock::now() - began), kLongestRest);
        lock.lock();
        if (!is_done) ends_ = true;
        changed_.wait_for(lock, rest, [this] { return ends_; });
    }
}

TouchAhead::~TouchAhead() {
    {
        std::lock_guard lock(mutex_);
        ends_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
}

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

}  // namespace quire
