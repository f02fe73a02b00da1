#include "core/core_share.hpp"

#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#endif

namespace quire {
namespace {

// Nanoseconds that this thread has waited for a core in its life; 0 if the kernel does not say. The
// file has the nanoseconds on a core, those waited for one, and a count.
int64_t waited_ns() {
#if defined(__linux__)
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    char text[96];
    const ssize_t size = read(file, text, sizeof(text) - 1);
    close(file);
    if (size <= 0) return 0;
    text[size] = 0;
    char* rest = nullptr;
    std::strtoll(text, &rest, 10);
    return std::strtoll(rest, nullptr, 10);
#else
    return 0;
#endif
}

}  // namespace

void CoreShare::restart() {
    start_ = Clock::now();
    waited_ns_ = waited_ns();
}

bool CoreShare::is_short(double most) {
    const auto window = Clock::now() - start_;
    if (window < kWindow) return false;
    const int64_t before = waited_ns_;
    const bool is_first = start_ == Clock::time_point();
    restart();
    const std::chrono::nanoseconds waited(waited_ns_ - before);
    return !is_first && waited > most * window;
}

}  // namespace quire
