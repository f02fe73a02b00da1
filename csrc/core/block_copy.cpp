#include "core/block_copy.hpp"

#include <cstring>

#include "core/line_copy.hpp"

namespace quire {
namespace {

static_assert(kContentUnit == kLineBytes);

constexpr size_t kLanes = 4;

// Digits of pi after the point: numbers that nobody has chosen.
constexpr uint64_t kKeys[kLanes] = {0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0,
                                    0x082efa98ec4e6c89};
constexpr uint64_t kStarts[kLanes] = {0x452821e638d01377, 0xbe5466cf34e90c6c, 0xc0ac29b7c97c50dd,
                                      0x3f84d5b5b5470917};

// Both halves of a product, one over the other: every bit of it depends on every bit of a and b.
uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Four chains, so that the processor multiplies for one while it waits for another.
class Sum {
   public:
    void add(const std::byte* unit) {
        for (size_t i = 0; i < kLanes; ++i) {
            uint64_t pair[2];
            std::memcpy(pair, unit + i * sizeof(pair), sizeof(pair));
            lanes_[i] = fold(pair[0] ^ lanes_[i], pair[1] ^ kKeys[i]);
        }
        ++units_;
    }

    BlockSum result() const {
        BlockSum sum = {kStarts[0] ^ units_, kStarts[1] ^ units_};
        for (size_t i = 0; i < kLanes; ++i) {
            sum[0] = fold(sum[0] ^ lanes_[i], kKeys[i]);
            sum[1] = fold(sum[1] ^ lanes_[i], kStarts[i]) + lanes_[i];
        }
        return sum;
    }

   private:
    uint64_t lanes_[kLanes] = {kStarts[0], kStarts[1], kStarts[2], kStarts[3]};
    uint64_t units_ = 0;
};

}  // namespace

BlockSum read_block(const std::vector<const std::byte*>& sources, const std::vector<size_t>& sizes,
                    std::byte* content) {
    Sum sum;
    for (size_t part = 0; part < sources.size(); ++part) {
        const std::byte* source = sources[part];
        const size_t size = sizes[part];
        size_t at = 0;
        for (; at + kContentUnit <= size; at += kContentUnit, content += kContentUnit) {
            sum.add(source + at);
            copy_line_past_caches(source + at, content);
        }
        if (at < size) {
            alignas(kContentUnit) std::byte last[kContentUnit] = {};
            std::memcpy(last, source + at, size - at);
            sum.add(last);
            copy_line_past_caches(last, content);
            content += kContentUnit;
        }
    }
    end_copies_past_caches();
    return sum.result();
}

BlockSum write_block(const std::byte* content, const std::vector<std::byte*>& targets,
                     const std::vector<size_t>& sizes) {
    Sum sum;
    for (size_t part = 0; part < targets.size(); ++part) {
        const size_t size = sizes[part];
        for (size_t at = 0; at < size; at += kContentUnit, content += kContentUnit) {
            const size_t left = size - at;
            sum.add(content);
            std::memcpy(targets[part] + at, content, left < kContentUnit ? left : kContentUnit);
        }
    }
    return sum.result();
}

BlockSum sum_block(const std::byte* content, size_t size) {
    Sum sum;
    for (size_t at = 0; at + kContentUnit <= size; at += kContentUnit) sum.add(content + at);
    return sum.result();
}

}  // namespace quire
