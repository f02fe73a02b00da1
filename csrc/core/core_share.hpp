// How much of a core a thread gets on a machine where other programs compute, too.
#pragma once

#include <chrono>
#include <cstdint>

namespace quire {

// Watches the thread that calls it. On Linux the kernel counts how long a thread that could run
// waited for a core (/proc/thread-self/schedstat); elsewhere nothing is seen.
//
// A window is longer than the period in which a container's quota is given out, so that a thread
// which gets most of a core is not taken for one that lost it.
class CoreShare {
   public:
    using Clock = std::chrono::steady_clock;
    static constexpr auto kWindow = std::chrono::milliseconds(100);

    // Whether the thread waited for a core for more than `most` (0 to 1) of the window that ends
    // now; false within a window, which costs one look at the clock.
    bool is_short(double most);

    // Begin a window.
    void restart();

   private:
    Clock::time_point start_ = {};
    int64_t waited_ns_ = 0;
};

}  // namespace quire
