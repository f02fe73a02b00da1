// Cutting the rows of a step into tiles.
#pragma once

#include "core/parallel.hpp"

namespace quire::QUIRE_LEVEL {

// A tile of elementwise work takes a few microseconds: long beside claiming it (0.1 us), short
// beside waiting for the last one.
constexpr int64_t kElementsPerTile = 16384;

// body(first, stop) over runs of 0..count-1 rows of `width` elements. The cut depends on the width
// alone, and rows do not see each other.
template <class Body>
inline void parallel_rows(Pool& pool, int64_t count, int64_t width, const Body& body) {
    const int64_t per_tile = width < kElementsPerTile ? kElementsPerTile / (width + !width) : 1;
    parallel(pool, (count + per_tile - 1) / per_tile, [&](int64_t tile, int) {
        const int64_t first = tile * per_tile;
        body(first, first + per_tile < count ? first + per_tile : count);
    });
}

}  // namespace quire::QUIRE_LEVEL
