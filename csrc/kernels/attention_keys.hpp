// The queries of a tile, and the keys and values of one KV head that they look at.
#pragma once

#include "kernels/attention_softmax.hpp"
#include "kernels/kv.hpp"

namespace quire::QUIRE_LEVEL {

// Where the keys and values of one row and KV head are.
struct Keys {
    Type type;  // of the step's activations
    const KVMemory& kv;
    const int32_t* blocks;
    int64_t head;
    int32_t* flaw;  // set where a block id is no block's

    char* block_at(int64_t position) const {
        int64_t block = blocks[position / kv.block_size];
        if (static_cast<uint64_t>(block) >= static_cast<uint64_t>(kv.num_blocks)) {
            __atomic_store_n(flaw, 1, __ATOMIC_RELAXED);
            block = 0;  // memory that may be read; the result is not used
        }
        return head_of(kv, block, head);
    }
    int64_t offset(int64_t position) const { return position % kv.block_size; }

    // Whether 16 keys of a segment are a tile in memory.
    bool has_tiles() const { return kv.tile == kLanes; }
    int64_t dim() const { return kv.head_dim; }
    bool has_scales() const { return kv.is_int8; }
};

// Queries of one KV head: row r is head r % per_kv of the token at position first + r / per_kv.
struct Queries {
    int64_t rows;
    int64_t per_kv;
    int64_t first;
    int64_t window;       // 0: none
    const float* slopes;  // [per_kv], times log2(e)
    int64_t length = 0;   // tokens of a prompt whose queries see what follows them; 0: they do not

    int64_t position(int64_t row) const { return first + row / per_kv; }
    int64_t stop() const { return high(position(rows - 1)); }
    // The end of the keys that the token at a position sees.
    int64_t high(int64_t position) const {
        if (length == 0) return position + 1;
        return window > 0 ? least(length, position + window) : length;
    }
    // The first key that the token at a position sees.
    int64_t low(int64_t position) const { return window > 0 ? most(0, position - window + 1) : 0; }
    Sight sight(int64_t row, int64_t segment, const float* key_scales,
                const float* value_scales) const {
        const int64_t p = position(row);
        return {most(0, low(p) - segment),
                least(kSegment, high(p) - segment),
                slopes[row % per_kv],
                static_cast<float>(segment - p),
                key_scales,
                value_scales};
    }
};

// The scales of int8 keys and values low..high-1 of a segment.
inline void gather_scales(const Keys& keys, int64_t segment, int64_t low, int64_t high,
                          float* key_scales, float* value_scales) {
    for (int64_t j = low; j < high; ++j) {
        char* head = keys.block_at(segment + j);
        const int64_t offset = keys.offset(segment + j);
        key_scales[j] = key_scales_of(keys.kv, head)[offset];
        value_scales[j] = value_scales_of(keys.kv, head)[offset];
    }
}

}  // namespace quire::QUIRE_LEVEL
