// Softmax in pieces that can be put together: the same bits however a step is cut.
//
// Keys are taken in segments of fixed length at absolute positions of their row. A segment gives
// each query its largest score, the sum of its weights and the weighted sum of the values, computed
// in one order from nothing but the segment. Segments are merged in order into a span, a fixed
// number of segments, and spans in order into the result. So it does not matter which segments or
// spans are computed together, by whom, or for how many queries at once; and a segment of which a
// query sees nothing leaves what is merged as it is.
#pragma once

#include "kernels/attention_vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kSegment = 128;
constexpr int64_t kSpan = 1024;
constexpr double kLog2e = 1.4426950408889634;
constexpr float kNothing = -__builtin_inff();

inline int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// What turns a product of q and k into a score for powers of 2.
struct Scoring {
    float factor;
    float cap;  // 0: none

    Scoring(double scale, double softcap)
        : factor(static_cast<float>(softcap == 0 ? scale * kLog2e : scale / softcap)),
          cap(static_cast<float>(softcap * kLog2e)) {}
    F32 operator()(F32 product) const {
        const F32 score = mul(product, splat(factor));
        return cap == 0 ? score : mul(splat(cap), score_tanh(score));
    }
};

// Which keys of a segment a query sees, and what meets them besides the product with q.
struct Sight {
    int64_t low, high;        // low..high-1 of 0..kSegment
    float slope;              // of ALiBi, times log2(e)
    float distance;           // of the segment's first key from the query
    const float* key_scales;  // of int8, or null
    const float* value_scales;
};

struct Weights {
    float most;
    float sum;
};

// The whole vectors of a segment that hold keys which a query sees: first..stop-1.
struct SeenVectors {
    int64_t first, stop;

    explicit SeenVectors(const Sight& sight)
        : first(sight.low / kLanes * kLanes), stop(rounded_up(sight.high, kLanes)) {}
};

// v where the query sees the keys i..i+15, `other` elsewhere.
inline F32 where_seen(const Sight& sight, int64_t i, F32 v, float other) {
    const int64_t low = most(0, sight.low - i), high = least(kLanes, sight.high - i);
    return high - low == kLanes ? v : between(v, low, high, splat(other));
}

// Products to scores, in place: s [kSegment] holds products where the query sees keys, and gets
// scores there and kNothing elsewhere in the vectors seen. The largest scores of the lanes.
inline F32 score_segment(const Scoring& scoring, const Sight& sight, const SeenVectors& seen,
                         float* s) {
    F32 top = splat(kNothing);
    for (int64_t i = seen.first; i < seen.stop; i += kLanes) {
        F32 product = load(s + i);
        if (sight.key_scales != nullptr) product = mul(product, load(sight.key_scales + i));
        F32 score = scoring(product);
        if (sight.slope != 0) {
            alignas(64) static constexpr float kCount[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                                 8, 9, 10, 11, 12, 13, 14, 15};
            const F32 distance = add(load(kCount), splat(sight.distance + static_cast<float>(i)));
            score = fma(splat(sight.slope), distance, score);
        }
        score = where_seen(sight, i, score, kNothing);
        store(s + i, score);
        top = max(top, score);
    }
    return top;
}

// Products to weights, in place: s [kSegment] holds products where the query sees keys, and gets
// weights there and 0 elsewhere. A call is little beside a segment.
[[gnu::noinline]] inline Weights soften(const Scoring& scoring, const Sight& sight, float* s) {
    if (sight.low >= sight.high) {
        for (int64_t i = 0; i < kSegment; i += kLanes) store(s + i, splat(0));
        return {kNothing, 0};
    }
    const SeenVectors seen(sight);
    const float peak = largest(score_segment(scoring, sight, seen, s));
    F32 sum = splat(0);
    for (int64_t i = 0; i < seen.first; i += kLanes) store(s + i, splat(0));
    for (int64_t i = seen.first; i < seen.stop; i += kLanes) {
        F32 weight = exp2(sub(load(s + i), splat(peak)));
        sum = add(sum, weight);
        if (sight.value_scales != nullptr)
            weight = where_seen(sight, i, mul(weight, load(sight.value_scales + i)), 0);
        store(s + i, weight);
    }
    for (int64_t i = seen.stop; i < kSegment; i += kLanes) store(s + i, splat(0));
    return {peak, reduce(sum)};
}

// Merged segments or spans of `rows` queries: the largest score, the sum of weights, and the
// weighted sum of values [rows, stride], relative to that score.
struct Merged {
    float* peaks;
    float* sums;
    float* values;
    int64_t rows;    // multiple of kLanes
    int64_t stride;  // multiple of kLanes

    static int64_t num_floats(int64_t rows, int64_t stride) { return rows * (stride + 2); }
    Merged(float* memory, int64_t num_rows, int64_t width)
        : peaks(memory),
          sums(memory + num_rows),
          values(memory + 2 * num_rows),
          rows(num_rows),
          stride(width) {}

    // Nothing is merged yet into `count` rows.
    void clear(int64_t first, int64_t count) const {
        for (int64_t r = first; r < first + count; ++r) {
            peaks[r] = kNothing;
            sums[r] = 0;
            for (int64_t i = 0; i < stride; i += kLanes) store(values + r * stride + i, splat(0));
        }
    }
    void clear() const { clear(0, rows); }
    // The rows from `first` on, for what looks at their values only.
    Merged from(int64_t first) const {
        Merged part = *this;
        part.values += first * stride;
        return part;
    }
};

// Take the next piece's peaks and sums of some rows in; the values are to become
// values * keep + piece's values * take, row by row.
[[gnu::noinline]] inline void merge_rows(float* into_peaks, float* into_sums, const float* peaks,
                                         const float* sums, int64_t rows, float* keep,
                                         float* take) {
    const F32 lowest = splat(-3e38f);  // -inf less -inf would be NaN
    each(rows, [&](auto lanes, int64_t r) {
        const F32 old = get(lanes, into_peaks + r), next = get(lanes, peaks + r);
        const F32 peak = max(old, next), base = max(lowest, peak);
        const F32 kept = exp2(sub(old, base)), taken = exp2(sub(next, base));
        const F32 sum = mul(get(lanes, into_sums + r), kept);
        put(lanes, into_peaks + r, peak);
        put(lanes, into_sums + r, fma(get(lanes, sums + r), taken, sum));
        put(lanes, keep + r, kept);
        put(lanes, take + r, taken);
    });
}
inline void merge_sums(const Merged& into, const float* peaks, const float* sums, float* keep,
                       float* take) {
    merge_rows(into.peaks, into.sums, peaks, sums, into.rows, keep, take);
}

inline void merge_values(float* into, F32 piece, float keep, float take) {
    store(into, fma(piece, splat(take), mul(load(into), splat(keep))));
}

// keep and take: room for a factor per row.
inline void merge(const Merged& into, const Merged& piece, float* keep, float* take) {
    merge_sums(into, piece.peaks, piece.sums, keep, take);
    for (int64_t r = 0; r < into.rows; ++r)
        for (int64_t i = 0; i < into.stride; i += kLanes)
            merge_values(into.values + r * into.stride + i,
                         load(piece.values + r * into.stride + i), keep[r], take[r]);
}

}  // namespace quire::QUIRE_LEVEL
