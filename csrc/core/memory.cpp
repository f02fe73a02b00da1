#include "core/memory.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {
namespace {

constexpr size_t kLine = 64;

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

#if defined(__linux__)

constexpr size_t kHugePage = size_t(2) << 20;

// `size`, a multiple of kHugePage, at a multiple of kHugePage; nullptr if the kernel refuses.
std::byte* map_huge(size_t size) {
    const size_t room = size + kHugePage;
    void* mapping = mmap(nullptr, room, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    auto* start = static_cast<std::byte*>(mapping);
    const size_t skip = round_up(reinterpret_cast<uintptr_t>(start), kHugePage) -
                        reinterpret_cast<uintptr_t>(start);
    if (skip > 0) munmap(start, skip);
    munmap(start + skip + size, room - skip - size);
    madvise(start + skip, size, MADV_HUGEPAGE);  // a kernel without them serves small pages
    return start + skip;
}

#endif

}  // namespace

Memory::Memory(size_t size) : size_(size) {
    if (size == 0) return;
#if defined(__linux__)
    if (size >= kHugePage) {
        mapped_ = round_up(size, kHugePage);
        data_ = map_huge(mapped_);
        if (data_ == nullptr) throw std::bad_alloc();
        return;
    }
#endif
    const size_t whole = round_up(size, kLine);
    data_ = static_cast<std::byte*>(std::aligned_alloc(kLine, whole));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, whole);
}

Memory::~Memory() {
#if defined(__linux__)
    if (mapped_ > 0) {
        munmap(data_, mapped_);
        return;
    }
#endif
    std::free(data_);
}

}  // namespace quire
