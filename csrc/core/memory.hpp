// Aligned memory, on huge pages where it is large.
#pragma once

#include <cstddef>
#include <utility>

namespace quire {

// Has a thread touch huge pages of `size` bytes together, which `Memory` of a huge page or more
// takes from then on: the kernel clears them while this process does something else. Does nothing
// on systems without huge pages, or while it is doing so already.
void prepare_memory(size_t size);

// Ends that, and frees what nobody has taken.
void end_preparation();

// Zeroed memory, aligned to 64 bytes, or to 2 MiB from that size on, where the kernel is asked to
// use huge pages. Pages that nobody has touched take no memory. Freed with the object.
class Memory {
   public:
    Memory() = default;
    // Throws std::bad_alloc.
    explicit Memory(size_t size);
    ~Memory();
    Memory(Memory&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)),
          mapped_(std::exchange(other.mapped_, 0)) {}
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(mapped_, other.mapped_);
        return *this;
    }

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    bool is_mapped() const { return mapped_ > 0; }

   private:
    std::byte* data_ = nullptr;
    size_t size_ = 0;
    size_t mapped_ = 0;  // bytes to unmap; 0 for memory of the heap
};

}  // namespace quire
