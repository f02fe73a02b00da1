// Many queries: a segment's keys and values are widened to fp32 once, in the order in which two
// small matrix products read them.
//
// Panels of kColumns keys (then of kColumns elements of the values) stay in the nearest cache while
// all rows pass over them, kRows at a time in registers.
#pragma once

#include "kernels/attention_direct.hpp"

namespace quire::QUIRE_LEVEL {

#if defined(__AVX512F__)
constexpr int kRows = 12, kRowStep = 3, kVectors = 2;
#elif defined(__AVX2__)
constexpr int kRows = 6, kRowStep = 2, kVectors = 1;
#else
constexpr int kRows = 3, kRowStep = 3, kVectors = 1;
#endif
constexpr int64_t kColumns = kVectors * kLanes;
constexpr int64_t kTileRows = 120;  // of all heads of a KV head: what fits the second cache

// done(r, c, sum) for R rows and kVectors vectors, sum = a[r] . b over `steps`, added up in order.
template <int R, int64_t kNextRow, int64_t kNext, class Done>
inline void small_product(const float* a, const float* b, int64_t steps, const Done& done) {
    F32 sums[R][kVectors];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kVectors; ++c) sums[r][c] = splat(0);
    for (int64_t t = 0; t < steps; ++t) {
        F32 column[kVectors];
        for (int c = 0; c < kVectors; ++c) column[c] = load(b + t * kColumns + c * kLanes);
        for (int r = 0; r < R; ++r) {
            const F32 factor = splat(a[r * kNextRow + t * kNext]);
            for (int c = 0; c < kVectors; ++c) sums[r][c] = fma(factor, column[c], sums[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kVectors; ++c) done(r, c, sums[r][c]);
}

// body(Count<m>) for the least multiple m of kRowStep with m >= n, n <= kRows: the rows from n on
// hold nothing that is used.
template <int M = kRowStep, class Body>
inline void with_group(int64_t n, const Body& body) {
    if constexpr (M < kRows) {
        if (n > M) return with_group<M + kRowStep>(n, body);
    }
    body(Count<M>{});
}

// Room for the rows that with_group and with_rows make of `rows`.
inline int64_t padded_rows(int64_t rows) { return rounded_up(rows + kRowStep - 1, kLanes); }

// Scratch memory of a tile of queries, in floats.
struct TileRoom {
    float *q, *s, *k, *v, *peaks, *sums, *keep, *take, *key_scales, *value_scales;

    static int64_t num_floats(int64_t rows, int64_t dim) {
        const int64_t padded = padded_rows(rows);
        const int64_t width = rounded_up(dim, kColumns);
        return rounded_up(rounded_up(rows, kRows) * dim, kLanes) + padded * kSegment +
               kSegment * (dim + width) + 4 * padded + 2 * kSegment;
    }
    TileRoom(float* memory, int64_t rows, int64_t dim) {
        const int64_t padded = padded_rows(rows);
        q = memory;
        s = q + rounded_up(rounded_up(rows, kRows) * dim, kLanes);
        k = s + padded * kSegment;
        v = k + kSegment * dim;
        peaks = v + kSegment * rounded_up(dim, kColumns);
        sums = peaks + padded;
        keep = sums + padded;
        take = keep + padded;
        key_scales = take + padded;
        value_scales = key_scales + kSegment;
        for (int64_t i = rows; i < padded; ++i) {
            peaks[i] = kNothing;
            sums[i] = 0;
        }
    }
};

// Keys low..high-1 of a segment as panels [kColumns keys] of [dim, kColumns]; other keys of their
// tiles are arbitrary.
template <class S>
inline void widen_keys(const Keys& keys, int64_t segment, int64_t low, int64_t high, float* k) {
    const int64_t dim = keys.kv.head_dim;
    const auto place = [&](int64_t j, int64_t d) {
        return k + j / kColumns * kColumns * dim + d * kColumns + j % kColumns;
    };
    if (!keys.has_tiles()) {
        for (int64_t j = low; j < high; ++j) {
            const S* key = key_of<S>(keys.kv, keys.block_at(segment + j), keys.offset(segment + j));
            for (int64_t d = 0; d < dim; ++d)
                *place(j, d) = first(load_part(key + key_step<S>(keys.kv, d), 1));
        }
        return;
    }
    for (int64_t j = low / kLanes * kLanes; j < high; j += kLanes) {
        const S* tile = key_of<S>(keys.kv, keys.block_at(segment + j), keys.offset(segment + j));
        for (int64_t d = 0; d < dim; d += kTogether<S>) {
            F32 key[kTogether<S>];
            if (d + kTogether<S> <= dim || kPack<S> == kTogether<S>)
                load_together(tile, d, key);
            else
                key[0] = load(tile + d * kLanes);
            for (int64_t i = 0; i < least(kTogether<S>, dim - d); ++i)
                store(place(j, d + i), key[i]);
        }
    }
}

// Values low..high-1 of a segment as panels [kColumns elements] of [kSegment, kColumns].
template <class S>
inline void widen_values(const Keys& keys, int64_t segment, int64_t low, int64_t high, float* v) {
    const int64_t dim = keys.kv.head_dim;
    for (int64_t j = low; j < high;) {
        const int64_t offset = keys.offset(segment + j);
        const S* value = value_of<S>(keys.kv, keys.block_at(segment + j), offset);
        const int64_t stop = least(high, j + keys.kv.block_size - offset);
        for (; j < stop; ++j, value += dim)
            each(dim, [&](auto lanes, int64_t i) {
                store(v + i / kColumns * kColumns * kSegment + j * kColumns + i % kColumns,
                      get(lanes, value + i));
            });
    }
}

inline void widen(const Keys& keys, int64_t segment, int64_t low, int64_t high,
                  const TileRoom& room) {
    with_stored(keys.type, keys.kv, [&](auto stored) {
        widen_keys<decltype(stored)>(keys, segment, low, high, room.k);
        widen_values<decltype(stored)>(keys, segment, low, high, room.v);
    });
    if (keys.has_scales())
        keys.gather_scales(segment, low, high, room.key_scales, room.value_scales);
}

// Queries in groups of kRows, [dim, kRows] each; load(row, to) leaves one in fp32 in `to` [dim].
template <class Load>
inline void fill_queries(const TileRoom& room, int64_t rows, int64_t dim, const Load& load) {
    for (int64_t i = rows / kRows * kRows * dim; room.q + i < room.s; ++i) room.q[i] = 0;
    for (int64_t r = 0; r < rows; ++r) {
        float* to = room.q + r / kRows * kRows * dim + r % kRows;
        load(r, room.k);  // keys come there later
        for (int64_t i = 0; i < dim; ++i) to[i * kRows] = room.k[i];
    }
}

inline bool can_share_values(const Queries& queries, const Keys& keys, int64_t row, int64_t count,
                             int64_t segment) {
    return queries.can_share_values(row, count, segment, 1, [&](int64_t j) {
        bool is_finite = true;
        with_stored(keys.type, keys.kv, [&](auto stored) {
            is_finite = keys.has_finite_value<decltype(stored)>(segment + j);
        });
        return is_finite;
    });
}

// The rows of a group, and which keys of a segment they see.
struct RowGroup {
    int64_t first, count;
    int64_t low, high;

    RowGroup(const Queries& queries, int64_t row, int64_t segment)
        : first(row), count(least(kRows, queries.rows - row)) {
        const int64_t a = queries.position(row), b = queries.position(row + count - 1);
        low = most(0, queries.low(a) - segment);
        high = least(kSegment, queries.high(b) - segment);
    }
};

inline void tile_scores(const Queries& queries, const TileRoom& room, int64_t dim, int64_t segment,
                        int64_t low, int64_t high) {
    for (int64_t j = low / kColumns * kColumns; j < high; j += kColumns) {
        for (int64_t row = 0; row < queries.rows; row += kRows) {
            const RowGroup group(queries, row, segment);
            if (group.high <= j || group.low >= j + kColumns) continue;
            float* s = room.s + row * kSegment + j;
            with_group(group.count, [&](auto count) {
                small_product<count.value, 1, kRows>(
                    room.q + row * dim, room.k + j * dim, dim,
                    [&](int r, int c, F32 sum) { store(s + r * kSegment + c * kLanes, sum); });
            });
        }
    }
}

// For R rows from `row` on and the keys low..high-1; only the first `count` are merged.
template <int R>
inline void tile_means(const TileRoom& room, int64_t i, int64_t row, int64_t count, int64_t low,
                       int64_t high, const Merged& into) {
    const float* s = room.s + row * kSegment + low;
    const float* v = room.v + i * kSegment + low * kColumns;
    small_product<R, kSegment, 1>(s, v, high - low, [&](int r, int c, F32 sum) {
        if (r < count)
            merge_values(into.values + (row + r) * into.stride + i + c * kLanes, sum,
                         room.keep[row + r], room.take[row + r]);
    });
}

template <class Source>
inline void tile_values(const Queries& queries, const Source& keys, const TileRoom& room,
                        int64_t segment, const Merged& into) {
    for (int64_t i = 0; i < keys.dim(); i += kColumns) {
        for (int64_t row = 0; row < queries.rows; row += kRows) {
            const RowGroup group(queries, row, segment);
            if (group.low >= group.high) continue;
            if (can_share_values(queries, keys, row, group.count, segment)) {
                with_group(group.count, [&](auto count) {
                    tile_means<count.value>(room, i, row, count.value, group.low, group.high, into);
                });
                continue;
            }
            for (int64_t r = row; r < row + group.count; ++r) {
                const Sight seen = queries.sight(r, segment, nullptr, nullptr);
                tile_means<kRowStep>(room, i, r, 1, seen.low, most(seen.low, seen.high), into);
            }
        }
    }
}

// Keys from..to-1, all of one span, merged into `span`. `keys` has dim() and has_scales(), and
// widen() brings those of a segment into the room.
template <class Source>
inline void tile_span(const Queries& queries, const Source& keys, const Scoring& scoring,
                      const TileRoom& room, int64_t from, int64_t to, const Merged& span) {
    const int64_t dim = keys.dim();
    const bool has_scales = keys.has_scales();
    for (int64_t segment = from / kSegment * kSegment; segment < to; segment += kSegment) {
        const int64_t low = most(0, from - segment), high = least(kSegment, to - segment);
        widen(keys, segment, low, high, room);
        tile_scores(queries, room, dim, segment, low, high);
        for (int64_t r = 0; r < queries.rows; ++r) {
            const Sight sight = queries.sight(r, segment, has_scales ? room.key_scales : nullptr,
                                              has_scales ? room.value_scales : nullptr);
            const Weights weights = soften(scoring, sight, room.s + r * kSegment);
            room.peaks[r] = weights.most;
            room.sums[r] = weights.sum;
        }
        merge_sums(span, room.peaks, room.sums, room.keep, room.take);
        tile_values(queries, keys, room, segment, span);
    }
}

}  // namespace quire::QUIRE_LEVEL
