#include "core/memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

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

constexpr size_t kPage = 4096;  // at least: more touches do no harm

// Pages are touched by writing, which waits for nobody who maps files meanwhile, as a call that
// populates memory does: imports took three to twelve times as long beside one.
class Preparation {
   public:
    explicit Preparation(size_t size) : size_(round_up(size, kHugePage)), start_(map_huge(size_)) {
        if (start_ == nullptr) return;
        next_ = start_;
        end_ = start_ + size_;
        thread_ = std::thread([this] { touch(); });
    }

    ~Preparation() {
        if (start_ == nullptr) return;
        std::byte* left = take_up_to_end();
        thread_.join();
        if (left < end_) munmap(left, end_ - left);
    }

    std::byte* take(size_t size) {
        const Turn turn(*this);
        if (size > size_t(end_ - next_)) return nullptr;
        next_ += size;
        return next_ - size;
    }

   private:
    // The lock, which the thread leaves to whoever waits for it.
    struct Turn {
        explicit Turn(Preparation& owner) : waiting(owner.waiting_) {
            ++waiting;
            lock = std::unique_lock(owner.mutex_);
        }
        ~Turn() { --waiting; }
        std::atomic<int>& waiting;
        std::unique_lock<std::mutex> lock;
    };

    std::byte* take_up_to_end() {
        const Turn turn(*this);
        return std::exchange(next_, end_);
    }

    void touch() {
        for (std::byte* at = start_;; at += kHugePage) {
            while (waiting_ > 0) std::this_thread::yield();
            std::lock_guard lock(mutex_);
            at = std::max(at, next_);  // pages that were taken are their taker's
            if (at == end_) return;
            for (size_t i = 0; i < kHugePage; i += kPage)
                *reinterpret_cast<volatile std::byte*>(at + i) = std::byte{0};
        }
    }

    const size_t size_;
    std::byte* const start_;
    std::byte* next_ = nullptr;  // the first page that nobody has taken
    std::byte* end_ = nullptr;
    std::mutex mutex_;
    std::atomic<int> waiting_ = 0;
    std::thread thread_;
};

std::mutex preparing;
std::optional<Preparation> preparation;

std::byte* take_prepared(size_t size) {
    std::lock_guard lock(preparing);
    return preparation ? preparation->take(size) : nullptr;
}

#endif

}  // namespace

void prepare_memory([[maybe_unused]] size_t size) {
#if defined(__linux__)
    std::lock_guard lock(preparing);
    if (!preparation && size > 0) preparation.emplace(size);
#endif
}

void end_preparation() {
#if defined(__linux__)
    std::lock_guard lock(preparing);
    preparation.reset();
#endif
}

Memory::Memory(size_t size) : size_(size) {
    if (size == 0) return;
#if defined(__linux__)
    if (size >= kHugePage) {
        mapped_ = round_up(size, kHugePage);
        data_ = take_prepared(mapped_);
        if (data_ == nullptr) data_ = map_huge(mapped_);
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
