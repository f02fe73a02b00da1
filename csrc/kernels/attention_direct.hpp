// Few queries: keys and values come straight from KV memory, each once for all queries of a KV
// head.
//
// While products with the keys of a tile are computed, its values are fetched, and with the values
// the keys of the next segment: 4 KiB tiles of blocks in any order are too short for the hardware
// to foresee.
#pragma once

#include "kernels/attention_keys.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int kDirectRows = 8;
constexpr int64_t kTilesOfSegment = kSegment / kLanes;

#if defined(__AVX512F__)
constexpr int kSums = 24;  // vectors that registers hold beside what is loaded
#elif defined(__AVX2__)
constexpr int kSums = 6;
#else
constexpr int kSums = 3;
#endif

constexpr int64_t kLine = 64;

// The largest power of two of vectors, at most 8, with `rows` sums each.
constexpr int vectors_for(int rows) {
    int count = 8;
    while (count > 1 && count * rows > kSums) count /= 2;
    return count;
}

// The tiles of keys and values of a segment.
struct SegmentTiles {
    const void* keys[kTilesOfSegment];
    const void* values[kTilesOfSegment];
    int64_t first, stop;  // which tiles hold keys that are seen

    void find(const Keys& from, int64_t segment, int64_t low, int64_t high) {
        first = low / kLanes;
        stop = (high + kLanes - 1) / kLanes;
        with_stored(from.type, from.kv, [&](auto stored) {
            using S = decltype(stored);
            for (int64_t t = first; t < stop; ++t) {
                const int64_t position = segment + t * kLanes;
                char* head = from.block_at(position);
                keys[t] = key_of<S>(from.kv, head, from.offset(position));
                values[t] = value_of<S>(from.kv, head, from.offset(position));
            }
        });
    }
};

// Two elements of 16 keys at d.
template <class S>
inline void load_two(const S* tile, int64_t d, F32& first, F32& second) {
    first = load(tile + d * kLanes);
    second = load(tile + (d + 1) * kLanes);
}
inline void load_two(const BF16* tile, int64_t d, F32& first, F32& second) {
    load_pairs(tile + d * kLanes, first, second);
}

// s[g][tile] = q[g] . keys of C tiles.
template <class S, int G, int C>
inline void tile_products(const float* q, int64_t dim, const S* const* keys, const S* const* values,
                          float* s) {
    F32 sums[G][C];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) sums[g][c] = splat(0);
    constexpr int64_t kBytes = kLanes * sizeof(S);                      // of one d
    constexpr int64_t kStep = kBytes * 2 < kLine ? kLine / kBytes : 2;  // d of a line, at least 2
    for (int64_t start = 0; start < dim; start += kStep) {
        for (int c = 0; c < C; ++c)
            for (int64_t line = 0; line < kStep * kBytes; line += kLine)
                __builtin_prefetch(reinterpret_cast<const char*>(values[c]) + start * kBytes +
                                   line);
        for (int64_t d = start; d < start + kStep; d += 2) {
            for (int c = 0; c < C; ++c) {
                F32 first, second;
                load_two(keys[c], d, first, second);
                for (int g = 0; g < G; ++g) {
                    sums[g][c] = fma(splat(q[g * dim + d]), first, sums[g][c]);
                    sums[g][c] = fma(splat(q[g * dim + d + 1]), second, sums[g][c]);
                }
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) store(s + g * kSegment + c * kLanes, sums[g][c]);
}

template <class S, int G>
[[gnu::noinline]] inline void direct_products(const float* q, int64_t dim,
                                              const SegmentTiles& tiles, float* s) {
    constexpr int C = vectors_for(G);
    for (int64_t t = tiles.first; t < tiles.stop; t += C) {
        const S *keys[C], *values[C];
        int64_t begin = least(t, kTilesOfSegment - C);  // C tiles are within s
        for (int c = 0; c < C; ++c) {
            const int64_t tile = most(tiles.first, least(begin + c, tiles.stop - 1));
            keys[c] = static_cast<const S*>(tiles.keys[tile]);
            values[c] = static_cast<const S*>(tiles.values[tile]);
        }
        tile_products<S, G, C>(q, dim, keys, values, s + begin * kLanes);
    }
}

// values [G, C vectors from i on] = ... * keep + weights s . values of the keys low..high-1 * take.
template <class S, int G, int C>
inline void weigh_columns(const float* s, const SegmentTiles& tiles, const void* const* ahead,
                          int64_t dim, int64_t i, int64_t low, int64_t high, const Merged& into,
                          const float* keep, const float* take) {
    F32 sums[G][C];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) sums[g][c] = splat(0);
    for (int64_t t = tiles.first; t < tiles.stop; ++t) {
        const int64_t first = most(low, t * kLanes), stop = least(high, (t + 1) * kLanes);
        const S* values = static_cast<const S*>(tiles.values[t]) + i;
        const char* next = static_cast<const char*>(ahead[t]) + i * sizeof(S);
        for (int64_t j = first; j < stop; ++j) {
            const int64_t at = (j - t * kLanes) * dim;
            constexpr int64_t kBytes = C * kLanes * sizeof(S);
            for (int64_t line = 0; line < kBytes; line += kLine)
                __builtin_prefetch(next + at * sizeof(S) + line);
            F32 v[C];
            for (int c = 0; c < C; ++c) v[c] = load(values + at + c * kLanes);
            for (int g = 0; g < G; ++g) {
                const F32 weight = splat(s[g * kSegment + j]);
                for (int c = 0; c < C; ++c) sums[g][c] = fma(weight, v[c], sums[g][c]);
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c)
            merge_values(into.values + g * into.stride + i + c * kLanes, sums[g][c], keep[g],
                         take[g]);
}

// From vector i on: as many vectors at once as registers hold sums for, since one sum alone waits for
// each addition; narrow heads have fewer.
template <class S, int G, int C = vectors_for(G)>
[[gnu::noinline]] inline void direct_values(const float* s, const SegmentTiles& tiles,
                                            const void* const* ahead, int64_t dim, int64_t low,
                                            int64_t high, const Merged& into, const float* keep,
                                            const float* take, int64_t i = 0) {
    for (; i + C * kLanes <= dim; i += C * kLanes)
        weigh_columns<S, G, C>(s, tiles, ahead, dim, i, low, high, into, keep, take);
    if constexpr (C > 1)
        direct_values<S, G, C / 2>(s, tiles, ahead, dim, low, high, into, keep, take, i);
}

// Scratch memory of direct attention, in floats.
struct DirectRoom {
    float *q, *s, *peaks, *sums, *keep, *take, *key_scales, *value_scales;

    static int64_t num_floats(int64_t dim) {
        return kDirectRows * (dim + kSegment) + 4 * kLanes + 2 * kSegment;
    }
    DirectRoom(float* memory, int64_t dim) {
        q = memory;
        s = q + kDirectRows * dim;
        peaks = s + kDirectRows * kSegment;
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

template <int N>
struct Count {
    static constexpr int value = N;
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
    SegmentTiles tiles[2];
    const auto find = [&](int64_t segment) {
        tiles[segment / kSegment % 2].find(keys, segment, most(0, from - segment),
                                           least(kSegment, to - segment));
    };
    const int64_t begin = from / kSegment * kSegment;
    find(begin);
    for (int64_t segment = begin; segment < to; segment += kSegment) {
        const int64_t low = most(0, from - segment), high = least(kSegment, to - segment);
        const SegmentTiles& here = tiles[segment / kSegment % 2];
        const bool is_last = segment + kSegment >= to;
        if (!is_last) find(segment + kSegment);
        const SegmentTiles& next = tiles[(segment / kSegment + !is_last) % 2];
        const void* ahead[kTilesOfSegment];
        for (int64_t t = here.first; t < here.stop; ++t)
            ahead[t] = next.keys[most(next.first, least(t, next.stop - 1))];
        const bool has_scales = keys.kv.is_int8;
        if (has_scales) gather_scales(keys, segment, low, high, room.key_scales, room.value_scales);
        dispatch([&](auto stored, auto count) {
            direct_products<decltype(stored), count.value>(room.q, dim, here, room.s);
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
            direct_values<decltype(stored), count.value>(room.s, here, ahead, dim, low, high, span,
                                                         room.keep, room.take);
        });
    }
}

}  // namespace quire::QUIRE_LEVEL
