// Copies of blocks between KV memory and the host's, with a checksum of what was copied.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// The content of a block is its parts, one after the other, each filled up with zeros to a multiple
// of 64 bytes: kContentUnit.
inline constexpr size_t kContentUnit = 64;

// 128 bits that differ where contents do, but for an accident of less than one in 2^40. It is no
// defence against somebody who chooses the contents.
using BlockSum = std::array<uint64_t, 2>;

// The parts at `sources`, of `sizes` bytes, -> `content`, aligned to kContentUnit, past the caches
// that steps use.
BlockSum read_block(const std::vector<const std::byte*>& sources, const std::vector<size_t>& sizes,
                    std::byte* content);

// `content` -> parts.
BlockSum write_block(const std::byte* content, const std::vector<std::byte*>& targets,
                     const std::vector<size_t>& sizes);

// Of `size` bytes, which is a multiple of kContentUnit.
BlockSum sum_block(const std::byte* content, size_t size);

}  // namespace quire
