// Sums of products in fp32, a few rows times a panel: what products with weights of every form
// share whose activations are not rounded.
//
// The order of an output's additions in a segment, for any number of rows: the products of kDepth
// inputs one after the other, then these sums one after the other.
#pragma once

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"

namespace quire::QUIRE_LEVEL {

// The height of a register block becomes a constant.
template <int M, int P, class E>
inline void multiply_rows(int64_t height, const typename Dots<E>::X* x, const E* w, int64_t pairs,
                          const Fetches& fetches, int64_t pass, float* sums, int64_t stride,
                          const Apart& apart, bool is_first) {
    constexpr int V = is_wide(M, P) ? kPanel / kLanes : kVectors;
    if (height == M) {
        for (int v = 0; v < kPanel / kLanes; v += V)
            multiply_block<M, V, P>(x, w, v, pairs, fetches.of(pass + v / V), sums, stride, apart,
                                    is_first);
    } else if constexpr (M > 1) {
        multiply_rows<M - 1, P>(height, x, w, pairs, fetches, pass, sums, stride, apart, is_first);
    }
}

// Rows of x as [segment][kDepth inputs][row][kDepth], so that a register block's rows lie side by
// side and a pass over all rows reads one stream.
template <class E>
struct FloatRows {
    using X = typename Dots<E>::X;
    int64_t in;
    int64_t segments;
    int64_t rows;
    X* x;

    FloatRows(const PackedWeight& w, int64_t num_rows, void* memory)
        : in(w.in / w.segments), segments(w.segments), rows(num_rows), x(static_cast<X*>(memory)) {}

    static size_t num_bytes(const PackedWeight& w, int64_t rows) {
        return w.segments * padded(w.in / w.segments) * rows * sizeof(X);
    }

    template <class From>
    void prepare(int64_t row, const From* from) const {
        for (int64_t s = 0; s < segments; ++s, from += in) {
            X* segment = x + s * padded(in) * rows + row * kDepth;
            for (int64_t k = 0; k < in; k += kDepth) {
                X* to = segment + k * rows;
                const int64_t count = in - k < kDepth ? in - k : kDepth;
                each(count,
                     [&](auto lanes, int64_t i) { put(lanes, to + i, get(lanes, from + k + i)); });
                if (count % 2) to[count] = X{};
            }
        }
    }

    // sums [rows, P * kPanel] of a segment for P panels, rows `stride` apart; weights(pair, count)
    // gives so many of the first panel's pairs of inputs, a multiple of kDepth / 2 from the first
    // of the segment on.
    template <int P, class Weights>
    void multiply(int64_t segment, float* sums, int64_t stride, Apart apart,
                  const Weights& weights) const {
        const int64_t pairs = (in + 1) / 2, before = segment * in / 2;
        const X* from = x + segment * padded(in) * rows;
        for (int64_t pair = 0; pair < pairs; pair += kDepth / 2) {
            const int64_t count = pairs - pair < kDepth / 2 ? pairs - pair : kDepth / 2;
            add_block<P>(from + pair * 2 * rows, count, weights(before + pair, count), sums, stride,
                         apart, pair == 0);
        }
    }

   private:
    // Register blocks of equal height, give or take one row: none is left with a single row.
    template <int P>
    void add_block(const X* from, int64_t count, const E* w, float* sums, int64_t stride,
                   Apart apart, bool is_first) const {
        constexpr int kHeight = P > 1 ? kFewRows : kRowBlock;
        constexpr int64_t kPasses = kPanel / kLanes / kVectors;  // over a block of rows
        const int64_t blocks = (rows + kHeight - 1) / kHeight;
        const int64_t bytes = count * 2 * kPanel * sizeof(E);
        const int64_t passes = rows == 1 && is_wide(1, P) ? 1 : blocks * kPasses;
        const Fetches fetches(w, bytes, passes, kPrefetchBytes);
        for (int64_t block = 0, row = 0; block < blocks; ++block) {
            const int64_t next = (block + 1) * rows / blocks;
            multiply_rows<kHeight, P>(next - row, from + row * kDepth, w, count, fetches,
                                      block * kPasses, sums + row * stride, stride, apart,
                                      is_first);
            row = next;
        }
    }

    static int64_t padded(int64_t count) { return (count + kDepth - 1) / kDepth * kDepth; }
};

}  // namespace quire::QUIRE_LEVEL
