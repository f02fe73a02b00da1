// What an adapter adds to some outputs of a row.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

// A block of outputs: [rank][16] values of B times the factors. Two sums hide the latency of the
// addition.
template <class E>
inline F32 expand_block(const E* b, const float* factors, int64_t rank) {
    F32 even = splat(0), odd = even;
    int64_t r = 0;
    for (; r + 2 <= rank; r += 2) {
        even = fma(splat(factors[r]), load(b + r * kLoraBlock), even);
        odd = fma(splat(factors[r + 1]), load(b + (r + 1) * kLoraBlock), odd);
    }
    if (r < rank) even = fma(splat(factors[r]), load(b + r * kLoraBlock), even);
    return add(even, odd);
}

// sums[i] += what the piece adds to output first + i, for `count` <= kPanelWidth outputs of it.
inline void add_piece(const LoraBank& bank, int64_t slot, const LoraPiece& piece, int64_t rank,
                      const float* factors, int64_t first, int64_t count, float* sums) {
    const int64_t at = (first - piece.start) % kLoraBlock;
    const int64_t block = (first - piece.start) / kLoraBlock;
    const int64_t offset = (slot * bank.blocks + piece.block) * bank.max_rank * kLoraBlock;
    float found[kPanelWidth + kLoraBlock];
    with_type(bank.type, [&](auto type) {
        using E = decltype(type);
        const E* b = static_cast<const E*>(bank.b) + offset + block * rank * kLoraBlock;
        for (int64_t i = 0; i < at + count; i += kLoraBlock, b += rank * kLoraBlock)
            store(found + i, expand_block(b, factors, rank));
    });
    each(count, [&](auto lanes, int64_t i) {
        put(lanes, sums + i, add(get(lanes, sums + i), get(lanes, found + at + i)));
    });
}

// Ask for the values of B that add_lora reads for the same outputs, of adapters that no other row
// has had in the cache.
inline void prefetch_lora(const LoraBank& bank, int64_t slot, int64_t lane, int64_t count) {
    const int64_t bytes = size_of(bank.type);
    for (int64_t p = 0; p < bank.num_pieces; ++p) {
        const LoraPiece& piece = bank.pieces[p];
        const int64_t rank = bank.ranks[slot * bank.parts + piece.part];
        const int64_t first = piece.start > lane ? piece.start : lane;
        const int64_t end = piece.start + piece.size;
        const int64_t stop = end < lane + count ? end : lane + count;
        if (rank == 0 || first >= stop) continue;
        const int64_t block = (first - piece.start) / kLoraBlock;
        const int64_t last = (stop - 1 - piece.start) / kLoraBlock;
        const int64_t start = (slot * bank.blocks + piece.block) * bank.max_rank + block * rank;
        const char* from = static_cast<const char*>(bank.b) + start * kLoraBlock * bytes;
        const int64_t size = (last + 1 - block) * rank * kLoraBlock * bytes;
        for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(from + i, 0, 2);
    }
}

// sums[i] += what the slot's adapter adds to output lane + i, for `count` <= kPanelWidth outputs.
inline void add_lora(const LoraBank& bank, int64_t slot, const float* factors, int64_t lane,
                     int64_t count, float* sums) {
    const int32_t* ranks = bank.ranks + slot * bank.parts;
    for (int64_t p = 0; p < bank.num_pieces; ++p) {
        const LoraPiece& piece = bank.pieces[p];
        const int64_t rank = ranks[piece.part], end = piece.start + piece.size;
        const int64_t first = piece.start > lane ? piece.start : lane;
        const int64_t stop = end < lane + count ? end : lane + count;
        if (rank > 0 && first < stop)
            add_piece(bank, slot, piece, rank, factors + piece.part * bank.max_rank, first,
                      stop - first, sums + first - lane);
    }
}

}  // namespace quire::QUIRE_LEVEL
