// How a kernel spreads its work: what kernels see of the thread pool.
//
// Kernels are compiled once per level, with flags that the machine may not support. An inline
// function of the standard library that such a file instantiates could be merged by the linker into
// the code of all others, so this header and everything else that kernels include stays free of it.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quire {

class Pool;

// Computes one tile. `worker` is below the pool's size and names the thread, for scratch memory
// only: a result must not depend on it. Must not throw.
using Tile = void (*)(const void* context, int64_t tile, int worker);

// Run tiles 0..num_tiles-1 on the pool's threads, the caller among them; returns when all are done.
void run_tiles(Pool& pool, int64_t num_tiles, Tile tile, const void* context);

// Of the pool; a result must not depend on it.
int num_threads(Pool& pool);

// Memory of one worker, at least `bytes`, aligned to 64, contents arbitrary. Valid until the tile
// ends or asks again.
void* scratch(Pool& pool, int worker, size_t bytes);

// Memory of the whole operation, like scratch(): what one region writes and the next one reads.
// Valid until the operation ends or asks again; not to be asked for in a tile.
void* shared_scratch(Pool& pool, size_t bytes);

// The same for an operation that is made of others, which have shared_scratch() for themselves.
void* outer_scratch(Pool& pool, size_t bytes);

namespace {

// run_tiles for a callable `(int64_t tile, int worker)`. One tile costs no more than a call.
template <class Body>
inline void parallel(Pool& pool, int64_t num_tiles, const Body& body) {
    if (num_tiles == 1) return body(0, 0);
    run_tiles(
        pool, num_tiles,
        [](const void* context, int64_t tile, int worker) {
            (*static_cast<const Body*>(context))(tile, worker);
        },
        &body);
}

}  // namespace
}  // namespace quire
