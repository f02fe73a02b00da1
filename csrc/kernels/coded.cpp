// Products of activations that keep their values with weights that a checkpoint stores as codes,
// and the packing of such weights: a weight is (code - zero point) * scale, or a float of 8 bits
// or a number of a table times its scale. Activations that the format rounds are rounded while they
// are prepared.
//
// The order of an output's additions in a segment, for any number of rows: the products of a
// group's inputs with what codes are above their zero points, one after the other, then this sum
// times the group's scale on top of those of the groups before it.

#include "kernels/coded_panel.hpp"
#include "kernels/codes.hpp"
#include "kernels/float_product.hpp"
#include "kernels/kernels.hpp"
#include "kernels/product.hpp"
#include "kernels/round_rows.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Rows of a register block: codes and their tables take registers, too.
#if defined(__AVX512F__)
constexpr int kCodedRows = 10;
#elif defined(__AVX2__)
constexpr int kCodedRows = 4;
#else
constexpr int kCodedRows = 2;
#endif

// sums += x[row] * the inputs of 16 words for each of V vectors, from pair kPair on.
template <int kPair, int M, int V, WeightForm kForm, bool kHasZeros>
__attribute__((always_inline)) inline void add_pairs(F32 (&sums)[M][V], const float* x,
                                                     const CodeWords (&words)[V],
                                                     const Codes<kForm, kHasZeros> (&codes)[V]) {
    TwoInputs w[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) w[v] = codes[v].template pair<kPair>(words[v]);
    add_pair<M, V>(sums, x + 2 * kPair, w);
    if constexpr (kPair + 1 < 16 / bits_of(kForm)) add_pairs<kPair + 1>(sums, x, words, codes);
}

// sums = (is_first ? 0 : sums) + the products of `words` words of inputs of M rows. A function of
// its own, or GCC would keep sums and tables in memory: two thirds of the speed on AVX2.
template <int M, int V, int P, WeightForm kForm, bool kHasZeros>
__attribute__((noinline)) inline void add_group(const float* x, const GroupAt& at,
                                                const float* table, int vector, int64_t words,
                                                float* sums, int64_t stride, bool is_first) {
    constexpr int kInputs = 32 / bits_of(kForm);
    F32 acc[P][M][V];
    each_sum<P, M, V>([&](int p, int r, int v) { acc[p][r][v] = splat(0); });
    using Reader = Codes<kForm, kHasZeros>;
    Reader codes[P][V];
    each_sum<P, 1, V>([&](int p, int, int v) {
        codes[p][v].begin(at.zeros + p * at.apart + (vector + v) * kLanes, table);
    });
    const uint8_t* w = at.codes + vector * kWordLine / 2;
    for (int64_t i = 0; i < words; ++i, w += kWordLine, x += kInputs) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            CodeWords found[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                const uint8_t* here = w + p * at.apart + v * kLine;
                found[v] = load_words(here);
                fetch_weights<M>(here + kAhead, at.is_read_once);
            }
            add_pairs<0>(acc[p], x, found, codes[p]);
        }
    }
    each_sum<P, M, V>([&](int p, int r, int v) {
        const int64_t lane = (vector + v) * kLanes;
        float* sum = sums + p * kPanel + r * stride + lane;
        const F32 before = is_first ? splat(0) : load(sum);
        F32 scale = scales_at(at, p, lane);
        if constexpr (Reader::kUnit != 1) scale = mul(scale, splat(Reader::kUnit));
        store(sum, fma(acc[p][r][v], scale, before));
    });
}

template <WeightForm kForm, bool kHasZeros>
class CodedProduct {
    static constexpr int64_t kInputs = 32 / bits_of(kForm);  // of a word

   public:
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        const bool is_changed = a.weight.order != nullptr || is_rounded(a.weight);
        const size_t changed = is_changed ? rows * a.weight.in * sizeof(float) : 0;
        return FloatRows<float>::num_bytes(a.weight, rows) + changed;
    }

    static constexpr int kMostPanels = 4;

    CodedProduct(const LinearArgs& a, int64_t rows, void* memory)
        : a_(a),
          panel_(a.weight),
          x_(a.weight, rows, memory),
          changed_(static_cast<char*>(memory) + FloatRows<float>::num_bytes(a.weight, rows)) {}

    int64_t segments() const { return x_.segments; }

    void prepare(int64_t row, int64_t token) const {
        with_type(a_.weight.type, [&](auto type) {
            prepare_row(row, token, row_of<decltype(type)>(a_.x, token, 0));
        });
        if (const int64_t count = x_.in % kInputs; count != 0) {  // of one segment
            const int64_t last = x_.in / kDepth * kDepth;
            float* to = x_.x + last * x_.rows + row * kDepth;
            for (int64_t i = x_.in - last; i % kInputs != 0; ++i) to[i] = 0;
        }
    }

    template <int P>
    void multiply(int64_t panel, int64_t segment, float* sums, int64_t stride) const {
        constexpr int kHeight = P > 1 ? kFewRows : kCodedRows;
        const float* x = x_.x + segment * round_up(x_.in, kDepth) * x_.rows;
        const int64_t blocks = (x_.rows + kHeight - 1) / kHeight;
        for (int64_t first = 0; first < x_.in; first += kDepth, x += kDepth * x_.rows) {
            for (int64_t block = 0, row = 0; block < blocks; ++block) {
                const int64_t next = (block + 1) * x_.rows / blocks;
                multiply_rows<kHeight, P>(next - row, x + row * kDepth, panel, segment, first,
                                          sums + row * stride, stride);
                row = next;
            }
        }
    }

    F32 concluded(int64_t, F32 sum) const { return sum; }

   private:
    static bool is_rounded(const PackedWeight& w) { return w.rounding.to != RowType::kept; }

    template <class From>
    void prepare_row(int64_t row, int64_t token, const From* from) const {
        const PackedWeight& w = a_.weight;
        char* changed = changed_ + row * w.in * sizeof(float);
        if (is_rounded(w)) {
            auto* to = reinterpret_cast<float*>(changed);
            each(w.in, [&](auto lanes, int64_t i) { put(lanes, to + i, get(lanes, from + i)); });
            round_row(to, w.in, w.rounding, a_.peaks == nullptr ? nullptr : a_.peaks + token);
            x_.prepare(row, to);
            return;
        }
        if (w.order != nullptr) {
            auto* to = reinterpret_cast<From*>(changed);
            for (int64_t i = 0; i < w.in; ++i) to[i] = from[w.order[i]];
            from = to;
        }
        x_.prepare(row, from);
    }

    // The inputs of a segment from `first` on, kDepth of them; the height becomes a constant.
    template <int M, int P>
    void multiply_rows(int64_t height, const float* x, int64_t panel, int64_t segment,
                       int64_t first, float* sums, int64_t stride) const {
        if (height != M) {
            if constexpr (M > 1)
                multiply_rows<M - 1, P>(height, x, panel, segment, first, sums, stride);
            return;
        }
        constexpr int V = is_wide(M, P) ? kPanel / kLanes : kVectors;
        const int64_t stop = x_.in - first < kDepth ? x_.in : first + kDepth;
        for (int64_t k = first; k < stop; k += panel_.group, x += panel_.group) {
            const int64_t group = (segment * x_.in + k) / panel_.group;
            const GroupAt at(a_.weight, panel_, panel, group, x_.rows);
            const int64_t count = stop - k < panel_.group ? stop - k : panel_.group;
            for (int v = 0; v < kPanel / kLanes; v += V)
                add_group<M, V, P, kForm, kHasZeros>(x, at, a_.weight.table, v,
                                                     (count + kInputs - 1) / kInputs, sums, stride,
                                                     k == 0);
        }
    }

    const LinearArgs& a_;
    const CodedPanel panel_;
    const FloatRows<float> x_;
    char* const changed_;  // rows in the weight's order, or rounded
};

// Call `body` with a value of a type that names the product of a weight.
template <class Product>
struct Of {
    using Type = Product;
};
template <WeightForm kForm, class Body>
Status with_zeros(const PackedWeight& w, const Body& body) {
    return w.has_zeros ? body(Of<CodedProduct<kForm, true>>{})
                       : body(Of<CodedProduct<kForm, false>>{});
}
template <class Body>
Status with_product(const PackedWeight& w, const Body& body) {
    switch (w.form) {
        case WeightForm::codes4: return with_zeros<WeightForm::codes4>(w, body);
        case WeightForm::codes8: return with_zeros<WeightForm::codes8>(w, body);
        case WeightForm::table4: return body(Of<CodedProduct<WeightForm::table4, false>>{});
        default: return body(Of<CodedProduct<WeightForm::floats8, false>>{});
    }
}

Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    return with_product(a.weight, [&](auto product) {
        return multiply<typename decltype(product)::Type>(a, tokens, pool);
    });
}

Status grouped(const GroupedArgs& a, int64_t, Pool& pool) {
    return with_product(a.product.weight, [&](auto product) {
        return multiply_groups<typename decltype(product)::Type>(a, pool);
    });
}

}  // namespace

// Instead of the products in whole numbers of the level before, too, until one brings its own.
void fill_coded(Kernels& table) {
    table.linear_coded = {linear, grouped};
    table.linear_digits4 = table.linear_digits8 = {};
}

}  // namespace quire::QUIRE_LEVEL
