// Threads that compute the tiles of one operation after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/memory.hpp"
#include "core/parallel.hpp"

namespace quire {

// A region is the tiles of one operation. Its owner gives each thread a share of neighbouring
// tiles, an atomic word that holds how many of them nobody has claimed yet. A thread claims a tile
// by counting that down, first in its own share, whose word and whose memory no other core has in
// its cache, then in those of the others. So a thread that the operating system has taken off its
// core holds up nobody unless it sits on a tile.
//
// Invariants:
// - `region_` and the ends of shares are written only while nothing is unclaimed and every claimed
//   tile is finished, and read only by a thread that has claimed a tile, which keeps the region
//   from ending.
// - `finished_` reaches the number of tiles exactly when all are done.
//
// Threads spin for about 50 us after their last tile and then sleep in the kernel, so an idle pool
// costs nothing; the owner, too, when the last tiles take longer. They start with the first region
// that has work for them. After fork() the child has no threads; its first region starts new ones.
//
// Several pools may exist. A pool serves one region at a time: whoever runs tiles holds a Lease.
class Pool {
   public:
    // size >= 1: threads that compute, the calling one included.
    explicit Pool(int size);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Threads that exist now besides the caller.
    int num_started() const { return static_cast<int>(threads_.size()); }

    // Change the number of threads; the old ones end first. Takes the lease itself.
    void resize(int size);

    // The right to run regions, for one operation or a whole program.
    class Lease {
       public:
        explicit Lease(Pool& pool);
        void pause() { lock_.unlock(); }
        void resume() { lock_.lock(); }

       private:
        std::unique_lock<std::mutex> lock_;
    };

    // See parallel.hpp. The caller holds the lease.
    void run(int64_t num_tiles, Tile tile, const void* context);
    void* scratch(int worker, size_t bytes);
    void* shared_scratch(size_t bytes);
    void* outer_scratch(size_t bytes);

   private:
    struct Region {
        Tile tile = nullptr;
        const void* context = nullptr;
        int64_t num_tiles = 0;
    };

    // Tiles end - unclaimed .. end - 1 are left.
    struct alignas(64) Share {
        std::atomic<int64_t> unclaimed{0};
        int64_t end = 0;
    };

    void start();
    void stop();
    void work(int worker);
    bool compute(int worker);
    int64_t compute_share(Share& share, int worker);
    bool wait_for_region(uint32_t seen);
    void wait_for_end(int64_t num_tiles);
    void forget_threads_lost_by_fork();

    int size_;
    uint32_t birth_;  // forks of this process so far
    Region region_;
    std::unique_ptr<Share[]> shares_;  // of each thread
    alignas(64) std::atomic<int64_t> finished_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};  // what sleeping threads wait on
    std::atomic<int> sleeping_{0};
    std::atomic<bool> is_owner_asleep_{false};
    std::atomic<bool> is_stopping_{false};
    std::vector<Memory> scratch_;
    Memory shared_scratch_;
    Memory outer_scratch_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
};

}  // namespace quire
