#include "core/library.hpp"

#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace quire {

#if defined(__linux__)

namespace {

std::mutex mutex;
std::thread* loader = nullptr;  // never deleted: the process may end before it does

}  // namespace

void load_ahead(std::vector<std::string> paths) {
    std::lock_guard lock(mutex);
    if (loader != nullptr) return;
    try {
        loader = new std::thread([paths = std::move(paths)] {
            for (const std::string& path : paths)
                if (dlopen(path.c_str(), RTLD_NOW) == nullptr) return;  // never closed
        });
    } catch (const std::system_error&) {  // no more threads: `import torch` loads them
    }
}

void wait_for_libraries() {
    std::lock_guard lock(mutex);
    if (loader != nullptr && loader->joinable()) loader->join();
}

#else

void load_ahead(std::vector<std::string>) {}
void wait_for_libraries() {}

#endif

}  // namespace quire
