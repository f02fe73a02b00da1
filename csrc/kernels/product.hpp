// What all matrix products share: tiles over the lanes of the output, and what happens to a sum.
//
// A weight is cut into panels of kPanel output lanes. A tile multiplies all rows of a chunk with a
// few panels, so that a panel is read from memory once per chunk, and leaves fp32 sums that are
// finished (bias, activation, gate, rounding) while they are in the cache.
#pragma once

#include "core/parallel.hpp"
#include "kernels/finish.hpp"
#include "kernels/pairs.hpp"
#include "kernels/tiles.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kChunk = 240;  // rows whose sums stay in the second-level cache
// Work of a tile, in multiplications: some microseconds, however it is limited.
constexpr int64_t kTileWork = 131072;

inline int64_t panels_of(int64_t lanes) { return (lanes + kPanel - 1) / kPanel; }

// The panels that a tile's output lanes need: one, or with a gate also those that hold its other
// half, which need not begin at a panel.
struct Wanted {
    int64_t count;
    int64_t panels[3];
    int64_t up_at;
};

inline Wanted wanted(const LinearArgs& a, int64_t group) {
    if (!is_gate(a.finish.kind)) return {1, {group, 0, 0}, 0};
    const int64_t up = a.weight.out / 2 + group * kPanel, first = up / kPanel, at = up % kPanel;
    const bool has_next = at != 0 && first + 1 < panels_of(a.weight.out);
    return {has_next ? 3 : 2, {group, first, first + 1}, kPanel + at};
}

// The number of panels becomes a constant.
template <class Product>
inline void multiply_panels(const Product& product, int64_t count, int64_t panel, float* sums,
                            int64_t stride, int64_t apart) {
    if (count == 4) return product.template multiply<4>(panel, sums, stride, apart);
    if (count == 2) return product.template multiply<2>(panel, sums, stride, apart);
    product.template multiply<1>(panel, sums, stride, apart);
}

// How many groups a tile multiplies side by side: for few rows as many streams as the memory likes,
// but each thread is to have some tiles. The other panels of a gate must then follow one another too.
inline int64_t side_by_side(const LinearArgs& a, int64_t rows, int64_t groups, int threads) {
    if (rows > kFewRows) return 1;
    if (is_gate(a.finish.kind) && a.weight.out / 2 % kPanel != 0) return 1;
    return groups >= 32 * threads ? 4 : groups >= 16 * threads ? 2 : 1;
}

// y = finish(x @ weight), for a kind of weight: `Product(a, rows, memory)` has `prepare(row,
// token)`, which brings a token's x into the form it wants as a row, in memory of `num_bytes(a,
// rows)`, and then `multiply<P>(panel, sums, stride, apart)`, which leaves the sums of P panels,
// `apart` from one another, for all rows.
template <class Product>
inline Status multiply(const LinearArgs& a, int64_t tokens, Pool& pool) {
    const bool is_gated = is_gate(a.finish.kind);
    const int64_t groups = panels_of(is_gated ? a.weight.out / 2 : a.weight.out);
    const int64_t stride = is_gated ? 3 * kPanel : kPanel;
    for (int64_t first = 0; first < tokens; first += kChunk) {
        const int64_t rows = tokens - first < kChunk ? tokens - first : kChunk;
        const Product product(a, rows, shared_scratch(pool, Product::num_bytes(a, rows)));
        parallel_rows(pool, rows, a.weight.in, [&](int64_t row, int64_t stop) {
            for (; row < stop; ++row) product.prepare(row, first + row);
        });
        const int64_t work = a.weight.in * stride * (rows + 3) / 4;
        const int64_t together = side_by_side(a, rows, groups, num_threads(pool));
        const int64_t at_once = work < kTileWork ? kTileWork / (work + !work) : 1;
        const int64_t per_tile = (at_once + together - 1) / together * together;
        const int64_t apart = stride * rows;
        parallel(pool, (groups + per_tile - 1) / per_tile, [&](int64_t tile, int worker) {
            const size_t num_bytes = sizeof(float) * apart * together;
            auto* sums = static_cast<float*>(scratch(pool, worker, num_bytes));
            const int64_t end = (tile + 1) * per_tile, stop = end < groups ? end : groups;
            for (int64_t g = tile * per_tile, count; g < stop; g += count) {
                count = g + together <= stop ? together : 1;
                const Wanted from = wanted(a, g);
                for (int64_t i = 0; i < from.count; ++i)
                    multiply_panels(product, count, from.panels[i], sums + i * kPanel, stride, apart);
                for (int64_t j = 0; j < count; ++j)
                    QUIRE_VECTORS::finish_rows(a, first, rows, (g + j) * kPanel, sums + j * apart,
                                               stride, from.up_at);
            }
        });
    }
    return Status::ok;
}

}  // namespace quire::QUIRE_LEVEL
