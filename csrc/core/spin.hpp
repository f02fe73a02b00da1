// A short wait for another thread, before one that costs two turns through the kernel.
#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// A thread that is woken by the kernel comes back after about as long.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerLook = 16;  // a look at the clock costs about one pause

inline void pause_core() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spin until `is_done`, for at most `longest`. False if the time ran out.
template <class Condition>
bool spin_until(const Condition& is_done, std::chrono::nanoseconds longest = kSpin) {
    if (is_done()) return true;
    const auto end = std::chrono::steady_clock::now() + longest;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            pause_core();
            if (is_done()) return true;
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace quire
