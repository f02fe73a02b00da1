// Latents of a segment against the queries of a tile.
//
// Latents lie token after token and are widened to fp32 once for both products. Scores are computed
// with queries in vectors and the numbers of latents as factors, so that no side is transposed:
// s[key][query]; softmax then runs over vectors of queries. Means are weights[key][query] as
// factors of the latents in vectors.
#pragma once

#include "kernels/attention_pieces.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kLatentRows = 128;  // of all heads of some tokens, if one token has not more
constexpr int64_t kLatentSpan = 2 * kSegment;

// Keys of a register block with C vectors of queries.
constexpr int keys_with(int C) { return kRows * kVectors / C; }
// Keys of a segment, with room for those of the last register block.
constexpr int64_t kSegmentRoom = kSegment + keys_with(1);
constexpr int kKeyStep = 3;
static_assert(keys_with(1) % kKeyStep == 0 && keys_with(kVectors) % kKeyStep == 0);

// s[r][c] = key r . queries c over `width` numbers, in order: R keys `key_stride` apart, C vectors
// of queries with a vector for each number, `panel` apart. s has rows `stride` apart.
template <int R, int C>
[[gnu::noinline]] inline void score_block(const float* keys, int64_t key_stride,
                                          const float* queries, int64_t panel, int64_t width,
                                          float* s, int64_t stride) {
    constexpr int kGroups = R / kKeyStep;  // a group's keys are at fixed offsets from its first
    F32 sums[kGroups][kKeyStep][C];
    const float* first[kGroups];
    for (int g = 0; g < kGroups; ++g) {
        first[g] = keys + g * kKeyStep * key_stride;
        for (int k = 0; k < kKeyStep; ++k)
            for (int c = 0; c < C; ++c) sums[g][k][c] = splat(0);
    }
    for (int64_t d = 0; d < width; ++d) {
        F32 query[C];
        for (int c = 0; c < C; ++c) query[c] = load(queries + c * panel + d * kLanes);
        for (int g = 0; g < kGroups; ++g)
            for (int k = 0; k < kKeyStep; ++k) {
                const F32 number = splat(first[g][k * key_stride + d]);
                for (int c = 0; c < C; ++c) sums[g][k][c] = fma(number, query[c], sums[g][k][c]);
            }
    }
    for (int g = 0; g < kGroups; ++g)
        for (int k = 0; k < kKeyStep; ++k)
            for (int c = 0; c < C; ++c)
                store(s + (g * kKeyStep + k) * stride + c * kLanes, sums[g][k][c]);
}

// done(r, c, sum) for R queries and kVectors vectors of latents: sum = weights of query r . latents
// over `num_keys` keys, in order.
template <int R, class Done>
inline void mean_block(const float* weights, int64_t stride, const float* latents,
                       int64_t key_stride, int64_t num_keys, const Done& done) {
    F32 sums[R][kVectors];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kVectors; ++c) sums[r][c] = splat(0);
    for (int64_t j = 0; j < num_keys; ++j, weights += stride, latents += key_stride) {
        F32 latent[kVectors];
        for (int c = 0; c < kVectors; ++c) latent[c] = load(latents + c * kLanes);
        for (int r = 0; r < R; ++r) {
            const F32 weight = splat(weights[r]);
            for (int c = 0; c < kVectors; ++c) sums[r][c] = fma(weight, latent[c], sums[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kVectors; ++c) done(r, c, sums[r][c]);
}

// Where the latents of one row are.
struct Latents {
    Type type;
    const LatentMemory& memory;
    const int32_t* blocks;
    int32_t* flaw;

    int64_t width() const { return memory.rank + memory.rotated; }

    // fp32 latents of the positions first..first+count-1, `stride` apart.
    void widen(int64_t first, int64_t count, float* to, int64_t stride) const {
        with_type(type, [&](auto element) {
            using E = decltype(element);
            for (int64_t j = 0; j < count;) {
                const int64_t offset = (first + j) % memory.block_size;
                const E* latent = block_at<E>(first + j) + offset * width();
                const int64_t stop = least(count, j + memory.block_size - offset);
                for (; j < stop; ++j, latent += width())
                    each(width(), [&](auto lanes, int64_t i) {
                        store(to + j * stride + i, get(lanes, latent + i));
                    });
            }
        });
    }

   private:
    template <class E>
    const E* block_at(int64_t position) const {
        int64_t block = blocks[position / memory.block_size];
        if (static_cast<uint64_t>(block) >= static_cast<uint64_t>(memory.num_blocks)) {
            __atomic_store_n(flaw, 1, __ATOMIC_RELAXED);
            block = 0;  // memory that may be read; the result is not used
        }
        return reinterpret_cast<const E*>(memory.data + block * memory.block_bytes);
    }
};

// Scratch memory of a tile, in floats. Queries are panels of 16: [width][16 queries] each.
struct LatentRoom {
    int64_t vectors, padded;  // of queries: in use, and for all rows
    int64_t key_stride;
    float *q, *k, *s, *peaks, *sums, *keep, *take, *limits;

    static int64_t stride_of(int64_t width) { return rounded_up(width, kLanes); }
    static int64_t num_floats(int64_t rows, int64_t width) {
        return rounded_up(rows, kLanes) * width + kSegmentRoom * stride_of(width) + kColumns +
               (kSegmentRoom + 5) * padded_rows(rows);
    }

    LatentRoom(float* memory, int64_t rows, int64_t width)
        : vectors(rounded_up(rows, kLanes) / kLanes),
          padded(padded_rows(rows)),
          key_stride(stride_of(width)) {
        q = memory;
        k = q + vectors * kLanes * width;
        s = k + kSegmentRoom * key_stride + kColumns;
        peaks = s + kSegmentRoom * padded;
        sums = peaks + padded;
        keep = sums + padded;
        take = keep + padded;
        limits = take + padded;
        for (int64_t i = rows / kLanes * kLanes * width; i < vectors * kLanes * width; i += kLanes)
            store(q + i, splat(0));
        for (int64_t i = vectors * kLanes; i < padded; ++i) {
            peaks[i] = kNothing;
            sums[i] = 0;
            for (int64_t j = 0; j < kSegment; ++j) s[j * padded + i] = 0;
        }
    }

    // Where the number d of a query is.
    float* query(int64_t row, int64_t width) const {
        return q + row / kLanes * kLanes * width + row % kLanes;
    }
};

// s = scores of keys 0..num_keys-1 for all queries.
inline void latent_scores(const LatentRoom& room, int64_t width, int64_t num_keys) {
    const auto columns = [&](int64_t vector, auto count) {
        constexpr int C = count.value, R = keys_with(C);
        const float* queries = room.q + vector * kLanes * width;
        for (int64_t j = 0; j < num_keys; j += R)
            score_block<R, C>(room.k + j * room.key_stride, room.key_stride, queries,
                              kLanes * width, width, room.s + j * room.padded + vector * kLanes,
                              room.padded);
    };
    int64_t vector = 0;
    for (; vector + kVectors <= room.vectors; vector += kVectors)
        columns(vector, Count<kVectors>{});
    for (; vector < room.vectors; ++vector) columns(vector, Count<1>{});
}

// Scores of 16 queries to weights, in place; query i sees the keys below limits[i], all of them see
// those below num_seen.
inline void soften_column(const Scoring& scoring, float* s, int64_t stride, int64_t num_keys,
                          int64_t num_seen, const float* limits, float* peaks, float* sums) {
    F32 top = splat(kNothing);
    const F32 limit = sub(load(limits), splat(0.5f)), endless = splat(-kNothing);
    for (int64_t j = 0; j < num_keys; ++j) {
        F32 score = scoring(load(s + j * stride));
        if (j >= num_seen) {
            // 0 for a key that is seen, else -inf
            const F32 distance = sub(limit, splat(static_cast<float>(j)));
            score = add(score, min(splat(0), mul(distance, endless)));
        }
        store(s + j * stride, score);
        top = max(top, score);
    }
    const F32 base = max(top, splat(-3e38f));  // -inf less -inf would be NaN
    F32 sum = splat(0);
    for (int64_t j = 0; j < num_keys; ++j) {
        const F32 weight = exp2(sub(load(s + j * stride), base));
        sum = add(sum, weight);
        store(s + j * stride, weight);
    }
    store(peaks, top);
    store(sums, sum);
}

// span = span * keep + weighted sums of the latents * take.
inline void latent_means(const LatentRoom& room, int64_t rows, int64_t rank, int64_t num_keys,
                         const Merged& span) {
    for (int64_t i = 0; i < rank; i += kColumns) {
        for (int64_t row = 0; row < rows; row += kRows) {
            with_group(least(kRows, rows - row), [&](auto count) {
                mean_block<count.value>(
                    room.s + row, room.padded, room.k + i, room.key_stride, num_keys,
                    [&](int r, int c, F32 sum) {
                        merge_values(span.values + (row + r) * span.stride + i + c * kLanes, sum,
                                     room.keep[row + r], room.take[row + r]);
                    });
            });
        }
    }
}

// Keys from..to-1, all of one span, merged into `span`; row r is at position first + r / heads.
inline void latent_span(const Latents& latents, const Scoring& scoring, const LatentRoom& room,
                        int64_t rows, int64_t heads, int64_t first, int64_t from, int64_t to,
                        const Merged& span) {
    const int64_t width = latents.width();
    for (int64_t segment = from; segment < to; segment += kSegment) {
        const int64_t num_keys = least(kSegment, to - segment);
        latents.widen(segment, num_keys, room.k, room.key_stride);
        latent_scores(room, width, num_keys);
        for (int64_t row = 0; row < room.vectors * kLanes; row += kLanes) {
            for (int64_t i = 0; i < kLanes; ++i) {
                const int64_t position = first + least(row + i, rows - 1) / heads;
                room.limits[row + i] = static_cast<float>(position + 1 - segment);
            }
            const int64_t num_seen = first + row / heads + 1 - segment;
            soften_column(scoring, room.s + row, room.padded, num_keys, num_seen, room.limits + row,
                          room.peaks + row, room.sums + row);
        }
        merge_sums(span, room.peaks, room.sums, room.keep, room.take);
        latent_means(room, rows, latents.memory.rank, num_keys, span);
    }
}

}  // namespace quire::QUIRE_LEVEL
