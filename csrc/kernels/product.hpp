// What all matrix products share: tiles over the lanes of the output, and what happens to a sum.
//
// A weight is cut into panels of kPanel output lanes. A tile multiplies all rows of a chunk with a
// few panels, so that a panel is read from memory once per chunk, and leaves fp32 sums that are
// finished (bias, activation, gate, rounding) while they are in the cache.
#pragma once

#include "core/parallel.hpp"
#include "kernels/activation.hpp"
#include "kernels/pairs.hpp"
#include "kernels/tiles.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kChunk = 240;  // rows whose sums stay in the second-level cache
// Work of a tile, in multiplications: some microseconds, however it is limited.
constexpr int64_t kTileWork = 131072;

inline bool is_gate(FinishKind kind) {
    return kind == FinishKind::gated || kind == FinishKind::limited;
}

inline int64_t panels_of(int64_t lanes) { return (lanes + kPanel - 1) / kPanel; }

// body(lanes, offset) for the vectors of at most kPanel lanes.
template <class Body>
inline void each_lane(int64_t count, const Body& body) {
    each(count < kPanel ? count : kPanel, body);
}

template <class E, class A>
inline void finish_plain(const LinearArgs& a, int64_t token, int64_t lane, const float* sums) {
    E* y = row_of<E>(a.y, token, 0) + lane;
    each_lane(a.weight.out - lane, [&](auto lanes, int64_t i) {
        F32 v = load(sums + i);
        if (a.weight.bias != nullptr) v = add(v, load(a.weight.bias + lane + i));
        put(lanes, y + i, A::of(v));
    });
}

// `ups` are the sums of the lanes from half on.
template <class E, class A>
inline void finish_gated(const LinearArgs& a, int64_t token, int64_t lane, const float* gates,
                         const float* ups) {
    E* y = row_of<E>(a.y, token, 0) + lane;
    const int64_t half = a.weight.out / 2;
    const bool is_limited = a.finish.kind == FinishKind::limited;
    each_lane(half - lane, [&](auto lanes, int64_t i) {
        F32 gate = load(gates + i), up = load(ups + i);
        if (a.weight.bias != nullptr) {
            gate = add(gate, load(a.weight.bias + lane + i));
            up = add(up, load(a.weight.bias + half + lane + i));
        }
        put(lanes, y + i, is_limited ? limited(gate, up, a.finish.scale) : mul(A::of(gate), up));
    });
}

// The sum is rounded to E as a product of that type is; the rest is fp32.
template <class E>
inline void finish_logits(const LinearArgs& a, int64_t token, int64_t lane, const float* sums) {
    float* y = row_of<float>(a.y, token, 0) + lane;
    const F32 scale = splat(a.finish.scale), cap = splat(a.finish.softcap);
    each_lane(a.weight.out - lane, [&](auto lanes, int64_t i) {
        F32 v = load(sums + i);
        if (a.weight.bias != nullptr) v = add(v, load(a.weight.bias + lane + i));
        v = mul(rounded(E{}, v), scale);
        if (a.finish.softcap != 0) v = mul(cap, tanh(div(v, cap)));
        put(lanes, y + i, v);
    });
}

// Finish kPanel lanes from `lane` on of some rows; row r's sums are at sums + r * stride, those of
// the other half of a gate at an offset of up_at.
template <class E>
inline void finish_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane,
                        const float* sums, int64_t stride, int64_t up_at) {
    if (a.finish.kind == FinishKind::logits) {
        for (int64_t r = 0; r < rows; ++r) finish_logits<E>(a, token + r, lane, sums + r * stride);
        return;
    }
    with_act(a.finish.act, [&](auto act) {
        using A = decltype(act);
        for (int64_t r = 0; r < rows; ++r) {
            const float* row = sums + r * stride;
            if (is_gate(a.finish.kind))
                finish_gated<E, A>(a, token + r, lane, row, row + up_at);
            else
                finish_plain<E, A>(a, token + r, lane, row);
        }
    });
}

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

// y = finish(x @ weight), for a kind of weight: `Product(a, rows, memory)` has `prepare(row, x)`,
// which brings a row into the form it wants, in memory of `num_bytes(a, rows)`, and then
// `multiply<P>(panel, sums, stride, apart)`, which leaves the sums of P panels, `apart` from one
// another, for all rows.
template <class E, class Product>
inline Status multiply(const LinearArgs& a, int64_t tokens, Pool& pool) {
    const bool is_gated = is_gate(a.finish.kind);
    const int64_t groups = panels_of(is_gated ? a.weight.out / 2 : a.weight.out);
    const int64_t stride = is_gated ? 3 * kPanel : kPanel;
    for (int64_t first = 0; first < tokens; first += kChunk) {
        const int64_t rows = tokens - first < kChunk ? tokens - first : kChunk;
        const Product product(a, rows, shared_scratch(pool, Product::num_bytes(a, rows)));
        parallel_rows(pool, rows, a.weight.in, [&](int64_t row, int64_t stop) {
            for (; row < stop; ++row) product.prepare(row, row_of<E>(a.x, first + row, 0));
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
                    finish_rows<E>(a, first, rows, (g + j) * kPanel, sums + j * apart, stride,
                                   from.up_at);
            }
        });
    }
    return Status::ok;
}

}  // namespace quire::QUIRE_LEVEL
