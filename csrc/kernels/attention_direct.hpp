// Few queries: keys and values come straight from KV memory, each once for all queries of a KV
// head, and are widened in registers.
#pragma once

#include "kernels/attention_fetch.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int kDirectRows = 8;

#if defined(__AVX512F__)
constexpr int kSums = 24;  // vectors that registers hold beside what is loaded
#elif defined(__AVX2__)
constexpr int kSums = 6;
#else
constexpr int kSums = 3;
#endif

// The largest power of two of vectors, at most 8, with `rows` sums each.
constexpr int vectors_for(int rows) {
    int count = 8;
    while (count > 1 && count * rows > kSums) count /= 2;
    return count;
}

// Elements of 16 keys that are loaded together: two, or as many as are packed.
template <class S>
constexpr int kTogether = kPack<S> > 2 ? kPack<S> : 2;

// Those from d on.
template <class S>
inline void load_together(const S* tile, int64_t d, F32* to) {
    to[0] = load(tile + d * kLanes);
    to[1] = load(tile + (d + 1) * kLanes);
}
inline void load_together(const BF16* tile, int64_t d, F32* to) {
    load_pairs(tile + d * kLanes, to[0], to[1]);
}
inline void load_together(const I8* tile, int64_t d, F32* to) { load_fours(tile + d * kLanes, to); }

// s[g][tile] = q[g] . keys of C tiles; as much is fetched as is read.
template <class S, int G, int C>
inline void tile_products(const float* q, int64_t dim, const S* const* keys, Ahead<1>& ahead,
                          float* s) {
    F32 sums[G][C];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) sums[g][c] = splat(0);
    constexpr int64_t kBytes = kLanes * sizeof(S);  // of one d
    constexpr int64_t kStep =
        kBytes * 2 < kLineBytes ? kLineBytes / kBytes : 2;  // d of a line, at least 2
    for (int64_t start = 0; start < dim; start += kStep) {
        for (int64_t line = 0; line < kStep * kBytes; line += kLineBytes) {
            ahead.fetch<C>();
            for (int c = 0; c < C; ++c)
                fetch_early(reinterpret_cast<const char*>(keys[c]) + start * kBytes + line +
                            kNear * kLineBytes);
        }
        for (int64_t d = start; d < start + kStep; d += kTogether<S>) {
            for (int c = 0; c < C; ++c) {
                F32 key[kTogether<S>];
                load_together(keys[c], d, key);
                for (int g = 0; g < G; ++g)
                    for (int k = 0; k < kTogether<S>; ++k)
                        sums[g][c] = fma(splat(q[g * dim + d + k]), key[k], sums[g][c]);
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) store(s + g * kSegment + c * kLanes, sums[g][c]);
}

template <class S, int G>
[[gnu::noinline]] inline void direct_products(const float* q, int64_t dim,
                                              const SegmentTiles& tiles, Ahead<1> ahead, float* s) {
    constexpr int C = vectors_for(G);
    for (int64_t t = tiles.first; t < tiles.stop; t += C) {
        const S* keys[C];
        int64_t begin = least(t, kTilesOfSegment - C);  // C tiles are within s
        for (int c = 0; c < C; ++c) {
            const int64_t tile = most(tiles.first, least(begin + c, tiles.stop - 1));
            keys[c] = static_cast<const S*>(tiles.keys[tile]);
        }
        tile_products<S, G, C>(q, dim, keys, ahead, s + begin * kLanes);
    }
}

// sums [G, C vectors], of rows `dim` long, += weights s . values of `count` keys.
template <class S, int G, int C>
inline void add_values(const float* s, const S* values, int64_t count, int64_t dim, Ahead<1>& ahead,
                       float* sums) {
    F32 here[G][C];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) here[g][c] = load(sums + g * dim + c * kLanes);
    constexpr int64_t kBytes = C * kLanes * sizeof(S);
    for (int64_t j = 0; j < count; ++j, values += dim) {
        for (int64_t at = 0; at < kBytes; at += kLineBytes) {
            ahead.fetch<1>();
            fetch_early(reinterpret_cast<const char*>(values + kNear / 2 * dim) + at);
        }
        F32 v[C];
        for (int c = 0; c < C; ++c) v[c] = load(values + c * kLanes);
        for (int g = 0; g < G; ++g) {
            const F32 weight = splat(s[g * kSegment + j]);
            for (int c = 0; c < C; ++c) here[g][c] = fma(weight, v[c], here[g][c]);
        }
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) store(sums + g * dim + c * kLanes, here[g][c]);
}

// From vector i on: as many vectors at once as registers hold sums for, since one sum alone waits
// for each addition; narrow heads have fewer.
template <class S, int G, int C = vectors_for(G)>
inline void add_row_values(const float* s, const S* values, int64_t count, int64_t dim,
                           Ahead<1>& ahead, float* sums, int64_t i = 0) {
    for (; i + C * kLanes <= dim; i += C * kLanes)
        add_values<S, G, C>(s, values + i, count, dim, ahead, sums + i);
    if constexpr (C > 1) add_row_values<S, G, C / 2>(s, values, count, dim, ahead, sums, i);
}

// into = into * keep + weights s . values of the keys low..high-1 * take. A tile at a time, the
// sums of which wait in memory: a tile's values are read as they lie.
template <class S, int G>
[[gnu::noinline]] inline void direct_values(const float* s, const SegmentTiles& tiles,
                                            Ahead<1> ahead, int64_t dim, int64_t low, int64_t high,
                                            const Merged& into, const float* keep,
                                            const float* take, float* sums) {
    for (int64_t i = 0; i < G * dim; i += kLanes) store(sums + i, splat(0));
    for (int64_t t = tiles.first; t < tiles.stop; ++t) {
        const int64_t first = most(low, t * kLanes), stop = least(high, (t + 1) * kLanes);
        const S* values = static_cast<const S*>(tiles.values[t]) + (first - t * kLanes) * dim;
        add_row_values<S, G>(s + first, values, stop - first, dim, ahead, sums);
    }
    for (int g = 0; g < G; ++g)
        for (int64_t i = 0; i < dim; i += kLanes)
            merge_values(into.values + g * into.stride + i, load(sums + g * dim + i), keep[g],
                         take[g]);
}

// Scratch memory of direct attention, in floats.
struct DirectRoom {
    float *q, *s, *means, *peaks, *sums, *keep, *take, *key_scales, *value_scales;

    static int64_t num_floats(int64_t dim) {
        return kDirectRows * (2 * dim + kSegment) + 4 * kLanes + 2 * kSegment;
    }
    DirectRoom(float* memory, int64_t dim) {
        q = memory;
        s = q + kDirectRows * dim;
        means = s + kDirectRows * kSegment;
        peaks = means + kDirectRows * dim;
        sums = peaks + kLanes;
        keep = sums + kLanes;
        take = keep + kLanes;
        key_scales = take + kLanes;
        value_scales = key_scales + kSegment;
        for (int64_t i = 0; i < kLanes; ++i) {
            peaks[i] = kNothing;
            sums[i] = 0;
        }
    }
};

// body(Count<m>) for the least power of two m >= n, n <= kDirectRows: the rows from n on hold
// nothing that is used.
template <int M = 1, class Body>
inline void with_rows(int64_t n, const Body& body) {
    if constexpr (M < kDirectRows) {
        if (n > M) return with_rows<2 * M>(n, body);
    }
    body(Count<M>{});
}

// Keys from..to-1, all of one span, merged into `span`; room.q [G, D].
inline void direct_span(const Queries& queries, const Keys& keys, const Scoring& scoring,
                        const DirectRoom& room, int64_t from, int64_t to, const Merged& span) {
    const int64_t dim = keys.kv.head_dim;
    const auto dispatch = [&](const auto& body) {
        with_stored(keys.type, keys.kv, [&](auto stored) {
            with_rows(queries.rows, [&](auto count) { body(stored, count); });
        });
    };
    each_segment(keys, from, to, [&](int64_t segment, int64_t low, int64_t high,
                                     const SegmentTiles& here, const SegmentTiles& next) {
        const bool has_scales = keys.kv.is_int8;
        if (has_scales) keys.gather_scales(segment, low, high, room.key_scales, room.value_scales);
        dispatch([&](auto stored, auto count) {
            direct_products<decltype(stored), count.value>(
                room.q, dim, here, {here.values, keys.tile_bytes()}, room.s);
        });
        for (int64_t g = 0; g < queries.rows; ++g) {
            const Sight sight = queries.sight(g, segment, has_scales ? room.key_scales : nullptr,
                                              has_scales ? room.value_scales : nullptr);
            const Weights weights = soften(scoring, sight, room.s + g * kSegment);
            room.peaks[g] = weights.most;
            room.sums[g] = weights.sum;
        }
        merge_sums(span, room.peaks, room.sums, room.keep, room.take);
        dispatch([&](auto stored, auto count) {
            using S = decltype(stored);
            const auto is_finite = [&](int64_t j) { return keys.has_finite_value<S>(segment + j); };
            const Ahead<1> ahead(next.keys, keys.tile_bytes());
            if (queries.can_share_values(0, queries.rows, segment, 1, is_finite))
                return direct_values<S, count.value>(room.s, here, ahead, dim, low, high, span,
                                                     room.keep, room.take, room.means);
            for (int64_t g = 0; g < queries.rows; ++g) {
                const Sight seen = queries.sight(g, segment, nullptr, nullptr);
                SegmentTiles tiles = here;
                tiles.first = most(here.first, seen.low / kLanes);
                tiles.stop = least(here.stop, (seen.high + kLanes - 1) / kLanes);
                direct_values<S, 1>(room.s + g * kSegment, tiles, ahead, dim, seen.low, seen.high,
                                    span.from(g), room.keep + g, room.take + g, room.means);
            }
        });
    });
}

}  // namespace quire::QUIRE_LEVEL
