#include "core/arena.hpp"

#include <functional>

namespace quire {

std::byte* Arena::take(size_t size) {
    Block* best = nullptr;
    for (Block& block : blocks_) {
        const size_t room = block.memory.size();
        const bool fits = block.is_free && room >= size && room / 2 <= size;
        if (fits && (best == nullptr || room < best->memory.size())) best = &block;
    }
    if (best == nullptr) best = &blocks_.emplace_back(Block{Memory(size)});
    best->is_free = false;
    return best->memory.data();
}

void Arena::give_back(std::byte* data) {
    for (Block& block : blocks_)
        if (block.memory.data() == data) block.is_free = true;
}

bool Arena::owns(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    for (const Block& block : blocks_) {
        const std::byte* start = block.memory.data();
        // std::less orders pointers into different blocks
        if (!std::less<>()(at, start) && std::less<>()(at, start + block.memory.size()))
            return true;
    }
    return false;
}

size_t Arena::num_bytes() const {
    size_t sum = 0;
    for (const Block& block : blocks_) sum += block.memory.size();
    return sum;
}

}  // namespace quire
