// Products with weights in floating point.
//
// The order of an output's additions, for any number of rows: the products of kDepth inputs one
// after the other, then these sums one after the other.

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"
#include "kernels/product.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// The height of a register block becomes a constant.
template <int M, class E>
inline void multiply_rows(int64_t height, const typename Dots<E>::X* x, const E* w, int64_t pairs,
                          float* sums, int64_t stride, bool is_first) {
    if (height == M) {
        for (int v = 0; v < kPanel / kLanes; v += kVectors)
            multiply_block<M, kVectors>(x, w, v, pairs, sums, stride, is_first);
    } else if constexpr (M > 1) {
        multiply_rows<M - 1>(height, x, w, pairs, sums, stride, is_first);
    }
}

// x as [kDepth inputs][row][kDepth], so that a register block's rows lie side by side and a pass
// over all rows reads one stream.
template <class E>
class FloatProduct {
   public:
    using X = typename Dots<E>::X;
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        return (a.weight.in + kDepth - 1) / kDepth * kDepth * rows * sizeof(X);
    }

    FloatProduct(const LinearArgs& args, int64_t rows, void* memory)
        : a_(args), rows_(rows), x_(static_cast<X*>(memory)) {}

    void prepare(int64_t row, const E* x) const {
        for (int64_t k = 0; k < a_.weight.in; k += kDepth) {
            X* to = x_ + k * rows_ + row * kDepth;
            const int64_t count = a_.weight.in - k < kDepth ? a_.weight.in - k : kDepth;
            each(count, [&](auto lanes, int64_t i) { put(lanes, to + i, get(lanes, x + k + i)); });
            if (count % 2) to[count] = X{};
        }
    }

    // sums [rows, kPanel] of a panel, rows `stride` apart.
    void multiply(int64_t panel, float* sums, int64_t stride) const {
        const int64_t pairs = (a_.weight.in + 1) / 2;
        const E* weight = static_cast<const E*>(a_.weight.panels) + panel * pairs * 2 * kPanel;
        for (int64_t pair = 0; pair < pairs; pair += kDepth / 2) {
            const int64_t count = pairs - pair < kDepth / 2 ? pairs - pair : kDepth / 2;
            add_block(pair, count, weight + pair * 2 * kPanel, sums, stride);
        }
    }

   private:
    // Register blocks of equal height, give or take one row: none is left with a single row.
    void add_block(int64_t pair, int64_t count, const E* w, float* sums, int64_t stride) const {
        const X* x = x_ + pair * 2 * rows_;
        const int64_t blocks = (rows_ + kRowBlock - 1) / kRowBlock;
        for (int64_t block = 0, row = 0; block < blocks; ++block) {
            const int64_t next = (block + 1) * rows_ / blocks;
            multiply_rows<kRowBlock>(next - row, x + row * kDepth, w, count, sums + row * stride,
                                     stride, pair == 0);
            row = next;
        }
    }

    const LinearArgs& a_;
    const int64_t rows_;
    X* const x_;
};

Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    return with_type(a.weight.type, [&](auto type) {
        using E = decltype(type);
        return multiply<E, FloatProduct<E>>(a, tokens, pool);
    });
}

}  // namespace

void fill_linear(Kernels& table) { table.linear = linear; }

}  // namespace quire::QUIRE_LEVEL
