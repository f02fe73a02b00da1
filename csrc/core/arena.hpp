// Memory for the activations of a recorded program.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/memory.hpp"

namespace quire {

// Blocks that are used again once they are given back. Nothing is freed before the arena itself, so
// that addresses in recorded calls stay valid. Not for several threads.
class Arena {
   public:
    // At least `size` bytes at the smallest free block that wastes no more than half of itself,
    // else at a new one; contents are arbitrary.
    std::byte* take(size_t size);
    void give_back(std::byte* data);

    // Whether the address lies in one of the blocks.
    bool owns(const void* address) const;
    size_t num_bytes() const;

   private:
    struct Block {
        Memory memory;
        bool is_free = false;
    };
    std::vector<Block> blocks_;
};

}  // namespace quire
