// Attention with dot products of several numbers at a time: groups of queries, which registers hold
// the sums of, pass over the tiles of keys and the values of a segment.
//
// What the numbers are is an Arithmetic: pairs of bfloat16 (attention_pairs.hpp) or bytes
// (attention_digits.hpp). A segment's values add up place by place in their tiles: first those of
// the first keys of all tiles, and so on, which reads memory in several streams. A key that no
// query of the piece sees counts as zeros there, whatever its memory holds.
#pragma once

#include "kernels/attention_fetch.hpp"

#if defined(__AVX512F__)

namespace quire::QUIRE_LEVEL {

constexpr int kSumRegisters = 24;  // vectors of sums beside what is loaded

// body(Count<m>) for the first of these m >= n: the rows from n on hold nothing that is used.
template <int M, int... More, class Body>
inline void with_count(int64_t n, const Body& body) {
    if constexpr (sizeof...(More) > 0) {
        if (n > M) return with_count<More...>(n, body);
    }
    body(Count<M>{});
}

// As many of 8, 4, 2 or 1 as there are registers for, with so many sums each.
constexpr int at_once(int sums) {
    int count = 8;
    while (count > 1 && count * sums > kSumRegisters) count /= 2;
    return count;
}

// body(a, b) for all a < A and b < B. Unrolled to the end, or sums would not be in registers.
template <int A, int B, class Body>
inline void each_of(const Body& body) {
#pragma GCC unroll 16
    for (int a = 0; a < A; ++a)
#pragma GCC unroll 16
        for (int b = 0; b < B; ++b) body(a, b);
}

// Of 16 vectors, kLanes apart, the lanes of each put together by `join`, in the order of reduce():
// those of vector i in lane i.
template <class Join>
inline F32 join_lanes(const float* vectors, const Join& join) {
    F32 halves[8], quarters[4], pairs[2];
    for (int i = 0; i < 8; ++i) {
        const F32 a = load(vectors + i * kLanes), b = load(vectors + (i + 8) * kLanes);
        halves[i] = join(F32{_mm512_shuffle_f32x4(a.v, b.v, 0x44)},
                         F32{_mm512_shuffle_f32x4(a.v, b.v, 0xee)});
    }
    for (int i = 0; i < 4; ++i)
        quarters[i] = join(F32{_mm512_shuffle_f32x4(halves[i].v, halves[i + 4].v, 0x88)},
                           F32{_mm512_shuffle_f32x4(halves[i].v, halves[i + 4].v, 0xdd)});
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(quarters[i].v), b = _mm512_castps_pd(quarters[i + 2].v);
        pairs[i] = join(F32{_mm512_castpd_ps(_mm512_unpacklo_pd(a, b))},
                        F32{_mm512_castpd_ps(_mm512_unpackhi_pd(a, b))});
    }
    const F32 all = join(F32{_mm512_shuffle_ps(pairs[0].v, pairs[1].v, 0x88)},
                         F32{_mm512_shuffle_ps(pairs[0].v, pairs[1].v, 0xdd)});
    const __m512i place = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return {_mm512_permutexvar_ps(place, all.v)};
}
inline F32 largest_lanes(const float* vectors) {
    return join_lanes(vectors, [](F32 a, F32 b) { return max(a, b); });
}
inline F32 sums_of_lanes(const float* vectors) {
    return join_lanes(vectors, [](F32 a, F32 b) { return add(a, b); });
}

// Parts of scratch memory, one after the other.
struct Scratch {
    float* next;

    template <class T = float>
    T* take(int64_t floats) {
        T* taken = reinterpret_cast<T*>(next);
        next += floats;
        return taken;
    }
};

// What a group of up to kLanes queries has against a segment.
struct GroupRoom {
    float* s;      // scores [rows][kSegment]
    float* lanes;  // of each row a vector [kLanes][kLanes]
    float *peaks, *sums, *keep, *take;

    static int64_t num_floats(int64_t rows) { return rows * kSegment + (kLanes + 4) * kLanes; }
    GroupRoom(Scratch& memory, int64_t rows) {
        s = memory.take(rows * kSegment);
        lanes = memory.take(kLanes * kLanes);
        peaks = memory.take(kLanes);
        sums = memory.take(kLanes);
        keep = memory.take(kLanes);
        take = memory.take(kLanes);
        for (int64_t i = 0; i < kLanes * kLanes; ++i) lanes[i] = 0;
    }
};

// Room for the values of the tiles at both ends of what is seen.
template <class S>
struct Edges {
    S* rows;  // [2][kLanes][dim]
    int64_t dim;

    static int64_t num_floats(int64_t dim) {
        return rounded_up(2 * kLanes * dim * int64_t(sizeof(S)), 64) / int64_t(sizeof(float));
    }

    // Where a tile has keys besides low..high-1, take a copy of its values with zeros for them.
    void cover(SegmentTiles& tiles, int64_t low, int64_t high) const {
        if (low % kLanes != 0) cover_tile(tiles, low / kLanes, low, high, rows);
        if (high % kLanes != 0 && (low % kLanes == 0 || high / kLanes != low / kLanes))
            cover_tile(tiles, high / kLanes, low, high, rows + kLanes * dim);
    }

   private:
    void cover_tile(SegmentTiles& tiles, int64_t tile, int64_t low, int64_t high, S* to) const {
        const S* from = static_cast<const S*>(tiles.values[tile]);
        const int64_t first = most(0, low - tile * kLanes),
                      stop = least(kLanes, high - tile * kLanes);
        __builtin_memset(to, 0, kLanes * dim * sizeof(S));
        __builtin_memcpy(to + first * dim, from + first * dim, (stop - first) * dim * sizeof(S));
        tiles.values[tile] = to;
    }
};

// Tiles of a segment.
struct TileRange {
    int64_t first, stop;
};

// Some rows of a group: which they are of all, and which of the group.
struct GroupRows {
    int64_t row, count, at;
};

// The queries of a piece with an Arithmetic, for its spans one after the other. A Source is where
// keys and values are.
template <class Arithmetic, class Source>
class Grouped {
    using Stored = typename Arithmetic::Stored;
    using Ahead = typename Arithmetic::Ahead;
    static constexpr int64_t kRows = Arithmetic::kRows;

   public:
    // Of scratch memory.
    static int64_t num_floats(int64_t rows, int64_t dim) {
        return Arithmetic::num_floats(rows, dim);
    }

    Grouped(const Queries& queries, const QueryRows& from, const Source& keys,
            const Scoring& scoring, float* memory)
        : queries_(queries),
          keys_(keys),
          scoring_(scoring),
          arithmetic_(memory, queries.rows, keys.dim()) {
        for (int64_t row = 0; row < queries.rows; row += kRows)
            arithmetic_.fill_group(from, {row, least(kRows, queries.rows - row), 0});
    }

    // Keys from..to-1, all of one span, into `span`.
    void attend(int64_t from, int64_t to, const Merged& span) const {
        if (queries_.rows <= kRows && keys_.has_tiles())
            attend_few(from, to, span);
        else
            attend_many(from, to, span);
    }

   private:
    const Stored* value_in(const SegmentTiles& tiles, int64_t j) const {
        return static_cast<const Stored*>(tiles.values[j / kLanes]) + j % kLanes * keys_.dim();
    }

    // Keys and values come straight from memory, each once.
    void attend_few(int64_t from, int64_t to, const Merged& span) const {
        const GroupRows rows{0, queries_.rows, 0};
        each_segment(keys_, from, to, [&](int64_t segment, int64_t low, int64_t high,
                                          SegmentTiles& here, const SegmentTiles& next) {
            const TileRange seen{here.first, here.stop};
            arithmetic_.gather_scales(keys_, segment, low, high);
            arithmetic_.template score<true>(rows, here, seen,
                                             Ahead(here.values, keys_.tile_bytes()));
            const bool is_first = segment <= from;
            soften(rows, segment, seen, is_first, span);
            const auto value = [&](int64_t j) { return value_in(here, j); };
            if (can_share_values(rows, segment, low, high)) {
                arithmetic_.cover(here, low, high);
                arithmetic_.direct_means(rows, here, Ahead(next.keys, keys_.tile_bytes()), is_first,
                                         span);
            } else {
                mean_one_by_one(rows, segment, value, is_first, span);
            }
        });
    }

    // Values are brought in order once for all groups of queries.
    void attend_many(int64_t from, int64_t to, const Merged& span) const {
        SegmentTiles tiles, next;
        for (int64_t segment = from / kSegment * kSegment; segment < to; segment += kSegment) {
            const int64_t low = most(0, from - segment), high = least(kSegment, to - segment);
            const bool fetches = keys_.has_tiles() && segment + 2 * kSegment <= to;
            if (fetches) keys_.find(segment + kSegment, 0, kSegment, next);
            if (keys_.has_tiles())
                keys_.find(segment, low, high, tiles);
            else
                arithmetic_.tile_keys(keys_, segment, low, high, tiles);
            const auto value = [&](int64_t j) {
                return keys_.has_tiles() ? value_in(tiles, j)
                                         : keys_.template value<Stored>(segment + j);
            };
            arithmetic_.gather_scales(keys_, segment, low, high);
            arithmetic_.pack_values(low, high, value);
            for (int64_t row = 0; row < queries_.rows; row += kRows) {
                const GroupRows rows{row, least(kRows, queries_.rows - row), 0};
                // the last groups see the whole segment
                const int64_t left = (queries_.rows - row - 1) / kRows;
                const void* const* ahead = nullptr;
                if (fetches && left < 2) ahead = left == 0 ? next.keys : next.values;
                const TileRange seen = tiles_seen(rows, segment);
                const bool is_first = segment <= from;
                if (seen.first == seen.stop) {
                    if (is_first) span.clear(row, rows.count);
                    continue;
                }
                if (ahead != nullptr)
                    arithmetic_.template score<true>(rows, tiles, seen,
                                                     Ahead(ahead, keys_.tile_bytes()));
                else
                    arithmetic_.template score<false>(rows, tiles, seen, Ahead(nullptr, 0));
                soften(rows, segment, seen, is_first, span);
                if (can_share_values(rows, segment, low, high)) {
                    arithmetic_.packed_means(rows, seen, is_first, span);
                } else {
                    mean_one_by_one(rows, segment, value, is_first, span);
                    arithmetic_.pack_values(low, high, value);
                }
            }
        }
    }

    TileRange tiles_seen(const GroupRows& rows, int64_t segment) const {
        const int64_t a = queries_.position(rows.row);
        const int64_t b = queries_.position(rows.row + rows.count - 1);
        const int64_t low = most(0, queries_.low(a) - segment);
        const int64_t high = least(kSegment, queries_.high(b) - segment);
        if (low >= high) return {0, 0};
        return {low / kLanes, (high + kLanes - 1) / kLanes};
    }

    // Products to weights for rows and tiles, and their sums into `span`.
    void soften(const GroupRows& rows, int64_t segment, const TileRange& seen, bool is_first,
                const Merged& span) const {
        const GroupRoom& room = arithmetic_.room;
        const auto sight = [&](int64_t r) {
            return queries_.sight(rows.row + r, segment, arithmetic_.key_scales(),
                                  arithmetic_.value_scales());
        };
        const auto score = [&](int64_t r) {
            const Sight here = sight(r);
            if (here.low >= here.high) return splat(kNothing);
            return score_segment(scoring_, here, SeenVectors(here), room.s + r * kSegment);
        };
        for (int64_t r = 0; r < rows.count; ++r) {
            store(room.lanes + r * kLanes, score(r));
        }
        store(room.peaks, largest_lanes(room.lanes));
        arithmetic_.weigh(rows.count, sight, seen);
        float *peaks = span.peaks + rows.row, *sums = span.sums + rows.row;
        if (!is_first)
            return merge_rows(peaks, sums, room.peaks, room.sums, rows.count, room.keep, room.take);
        store_part(peaks, rows.count, load(room.peaks));
        store_part(sums, rows.count, load(room.sums));
    }

    // Of the keys low..high-1, which the piece sees; the others of their tiles count as zeros.
    bool can_share_values(const GroupRows& rows, int64_t segment, int64_t low, int64_t high) const {
        return queries_.can_share_values(rows.row, rows.count, segment, kLanes, [&](int64_t j) {
            return j < low || j >= high || keys_.template has_finite_value<Stored>(segment + j);
        });
    }

    // Each row with the values that it sees itself.
    template <class Value>
    [[gnu::noinline]] void mean_one_by_one(const GroupRows& rows, int64_t segment,
                                           const Value& value, bool is_first,
                                           const Merged& span) const {
        for (int64_t r = 0; r < rows.count; ++r) {
            const GroupRows one{rows.row + r, 1, r};
            const Sight seen = queries_.sight(one.row, segment, nullptr, nullptr);
            if (seen.low < seen.high) arithmetic_.pack_values(seen.low, seen.high, value);
            arithmetic_.packed_means(one, tiles_seen(one, segment), is_first, span);
        }
    }

    const Queries& queries_;
    const Source& keys_;
    const Scoring& scoring_;
    const Arithmetic arithmetic_;
};

}  // namespace quire::QUIRE_LEVEL

#endif
