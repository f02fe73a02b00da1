#include "core/pool.hpp"

#include <new>
#include <stdexcept>

#include "core/spin.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif

namespace quire {
namespace {

std::atomic<uint32_t> num_forks{0};

// How many forks lie between the first process and this one.
uint32_t generation() {
#if defined(__unix__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1); });
    (void)registered;
#endif
    return num_forks.load(std::memory_order_relaxed);
}

// Signals stay with the threads that Python knows.
class BlockedSignals {
   public:
#if defined(__unix__) || defined(__APPLE__)
    BlockedSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

   private:
    sigset_t before_;
#endif
};

}  // namespace

Pool::Lease::Lease(Pool& pool) {
    pool.forget_threads_lost_by_fork();
    lock_ = std::unique_lock(pool.mutex_);
}

Pool::Pool(int size) : size_(size), birth_(generation()), scratch_(size > 0 ? size : 0) {
    if (size < 1) throw std::invalid_argument("a pool has at least one thread");
    shares_ = std::make_unique<Share[]>(size);
}

Pool::~Pool() {
    forget_threads_lost_by_fork();
    stop();
}

void Pool::resize(int size) {
    if (size < 1) throw std::invalid_argument("a pool has at least one thread");
    Lease lease(*this);
    stop();
    scratch_.resize(size);
    shares_ = std::make_unique<Share[]>(size);
    size_ = size;
}

void Pool::start() {
    BlockedSignals blocked;
    is_stopping_ = false;
    for (int worker = 1; worker < size_; ++worker) {
        threads_.emplace_back([this, worker] { work(worker); });
#if defined(__linux__)
        pthread_setname_np(threads_.back().native_handle(), "quire-cpu");
#endif
    }
}

void Pool::stop() {
    is_stopping_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

// The child of a fork has copies of the thread objects but no threads, and perhaps a mutex that one
// of them held. Only one thread runs in it, so the parts can be made anew.
void Pool::forget_threads_lost_by_fork() {
    const uint32_t now = generation();
    if (now == birth_) return;
    birth_ = now;
    new std::vector<std::thread>(std::move(threads_));  // never joined, so never destroyed
    threads_.clear();
    new (&mutex_) std::mutex;
    for (int i = 0; i < size_; ++i) shares_[i].unclaimed = 0;
    sleeping_ = 0;
}

void Pool::run(int64_t num_tiles, Tile tile, const void* context) {
    if (num_tiles <= 1 || size_ == 1) {
        for (int64_t i = 0; i < num_tiles; ++i) tile(context, i, 0);
        return;
    }
    if (threads_.empty()) start();
    region_ = {tile, context, num_tiles};
    finished_.store(0, std::memory_order_relaxed);
    for (int64_t i = 0, first = 0; i < size_; ++i) {
        Share& share = shares_[i];
        share.end = (i + 1) * num_tiles / size_;
        share.unclaimed.store(share.end - first, std::memory_order_release);
        first = share.end;
    }
    // Sequentially consistent, as is going to sleep: either we see the sleeper, or it sees us.
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) epoch_.notify_all();
    compute(0);
    wait_for_end(num_tiles);
}

// Claim and compute tiles of a share until none is left; how many there were.
int64_t Pool::compute_share(Share& share, int worker) {
    int64_t count = 0;
    int64_t left = share.unclaimed.load(std::memory_order_acquire);
    while (left > 0) {
        if (!share.unclaimed.compare_exchange_weak(left, left - 1, std::memory_order_acquire))
            continue;
        region_.tile(region_.context, share.end - left, worker);
        ++count;
        left = share.unclaimed.load(std::memory_order_acquire);
    }
    return count;
}

// The same for all shares, the own one first; false if there was no tile.
bool Pool::compute(int worker) {
    int64_t count = 0;
    for (int i = worker; i < size_; ++i) count += compute_share(shares_[i], worker);
    for (int i = 0; i < worker; ++i) count += compute_share(shares_[i], worker);
    if (count == 0) return false;
    const int64_t num_tiles = region_.num_tiles;
    // Sequentially consistent, as is going to sleep in wait_for_end().
    if (finished_.fetch_add(count) + count == num_tiles && is_owner_asleep_.load())
        finished_.notify_all();
    return true;
}

void Pool::wait_for_end(int64_t num_tiles) {
    const auto is_done = [&] { return finished_.load(std::memory_order_acquire) == num_tiles; };
    if (spin_until(is_done)) return;
    // A tile is long, or its thread waits for a core: it can have ours, which a thread that spins
    // or yields would keep.
    is_owner_asleep_.store(true);
    for (int64_t seen = finished_.load(); seen != num_tiles; seen = finished_.load())
        finished_.wait(seen);
    is_owner_asleep_.store(false);
}

void Pool::work(int worker) {
    while (!is_stopping_.load(std::memory_order_relaxed)) {
        const uint32_t seen = epoch_.load();
        if (compute(worker)) continue;
        if (wait_for_region(seen)) continue;
        sleeping_.fetch_add(1);
        epoch_.wait(seen);
        sleeping_.fetch_sub(1);
    }
}

// True if a region began, or the pool stops, while we spun.
bool Pool::wait_for_region(uint32_t seen) {
    return spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; });
}

static void* at_least(Memory& memory, size_t bytes) {
    if (memory.size() < bytes) memory = Memory(bytes);
    return memory.data();
}

void* Pool::scratch(int worker, size_t bytes) { return at_least(scratch_[worker], bytes); }

void* Pool::shared_scratch(size_t bytes) { return at_least(shared_scratch_, bytes); }

void* Pool::outer_scratch(size_t bytes) { return at_least(outer_scratch_, bytes); }

void run_tiles(Pool& pool, int64_t num_tiles, Tile tile, const void* context) {
    pool.run(num_tiles, tile, context);
}

int num_threads(Pool& pool) { return pool.size(); }

void* scratch(Pool& pool, int worker, size_t bytes) { return pool.scratch(worker, bytes); }

void* shared_scratch(Pool& pool, size_t bytes) { return pool.shared_scratch(bytes); }

void* outer_scratch(Pool& pool, size_t bytes) { return pool.outer_scratch(bytes); }

}  // namespace quire
