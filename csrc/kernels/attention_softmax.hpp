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

// Scores to weights, in place: s [kSegment] holds products where the query sees keys, and gets
// weights there and 0 elsewhere. A call is little beside a segment.
[[gnu::noinline]] inline Weights soften(const Scoring& scoring, const Sight& sight, float* s) {
    if (sight.low >= sight.high) {
        for (int64_t i = 0; i < kSegment; i += kLanes) store(s + i, splat(0));
        return {kNothing, 0};
    }
    const int64_t first = sight.low / kLanes * kLanes, stop = rounded_up(sight.high, kLanes);
    const auto masked = [&](int64_t i, F32 v, float other) {
        const int64_t low = most(0, sight.low - i), high = least(kLanes, sight.high - i);
        return high - low == kLanes ? v : between(v, low, high, splat(other));
    };
    F32 top = splat(kNothing);
    for (int64_t i = first; i < stop; i += kLanes) {
        F32 product = load(s + i);
        if (sight.key_scales != nullptr) product = mul(product, load(sight.key_scales + i));
        F32 score = scoring(product);
        if (sight.slope != 0) {
            alignas(64) static constexpr float kCount[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                                 8, 9, 10, 11, 12, 13, 14, 15};
            const F32 distance = add(load(kCount), splat(sight.distance + static_cast<float>(i)));
            score = fma(splat(sight.slope), distance, score);
        }
        score = masked(i, score, kNothing);
        store(s + i, score);
        top = max(top, score);
    }
    const float peak = largest(top);
    F32 sum = splat(0);
    for (int64_t i = 0; i < first; i += kLanes) store(s + i, splat(0));
    for (int64_t i = first; i < stop; i += kLanes) {
        F32 weight = exp2(sub(load(s + i), splat(peak)));
        sum = add(sum, weight);
        if (sight.value_scales != nullptr)
            weight = masked(i, mul(weight, load(sight.value_scales + i)), 0);
        store(s + i, weight);
    }
    for (int64_t i = stop; i < kSegment; i += kLanes) store(s + i, splat(0));
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

    void clear() const {
        for (int64_t r = 0; r < rows; r += kLanes) {
            store(peaks + r, splat(kNothing));
            store(sums + r, splat(0));
        }
        for (int64_t i = 0; i < rows * stride; i += kLanes) store(values + i, splat(0));
    }
};

// Take the next piece's peaks and sums in; the values are to become
// values * keep + piece's values * take, row by row.
[[gnu::noinline]] inline void merge_sums(const Merged& into, const float* peaks, const float* sums,
                                         float* keep, float* take) {
    const F32 lowest = splat(-3e38f);  // -inf less -inf would be NaN
    for (int64_t r = 0; r < into.rows; r += kLanes) {
        const F32 old = load(into.peaks + r), next = load(peaks + r);
        const F32 peak = max(old, next), base = max(lowest, peak);
        const F32 kept = exp2(sub(old, base)), taken = exp2(sub(next, base));
        store(into.peaks + r, peak);
        store(into.sums + r, fma(load(sums + r), taken, mul(load(into.sums + r), kept)));
        store(keep + r, kept);
        store(take + r, taken);
    }
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
