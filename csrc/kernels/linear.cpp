// Products with weights in floating point.

#include "kernels/element.hpp"
#include "kernels/float_product.hpp"
#include "kernels/kernels.hpp"
#include "kernels/product.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

template <class E>
class FloatProduct {
   public:
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        return FloatRows<E>::num_bytes(a.weight, rows);
    }

    static constexpr int kMostPanels = 4;

    FloatProduct(const LinearArgs& a, int64_t rows, void* memory)
        : a_(a), x_(a.weight, rows, memory) {}

    int64_t segments() const { return x_.segments; }

    void prepare(int64_t row, int64_t token) const { x_.prepare(row, row_of<E>(a_.x, token, 0)); }

    template <int P>
    void multiply(int64_t panel, int64_t segment, float* sums, int64_t stride) const {
        const int64_t panel_size = (a_.weight.in + 1) / 2 * 2 * kPanel;
        const E* weight = static_cast<const E*>(a_.weight.panels) + panel * panel_size;
        x_.template multiply<P>(segment, sums, stride,
                                Apart{panel_size, a_.weight.is_streamed && x_.rows == 1},
                                [&](int64_t pair, int64_t) { return weight + pair * 2 * kPanel; });
    }

    F32 concluded(int64_t, F32 sum) const { return sum; }

   private:
    const LinearArgs& a_;
    const FloatRows<E> x_;
};

template <class E>
Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    return multiply<FloatProduct<E>>(a, tokens, pool);
}

template <class E>
Status grouped(const GroupedArgs& a, int64_t, Pool& pool) {
    return multiply_groups<FloatProduct<E>>(a, pool);
}

template <class E>
Status heads_linear(const HeadsArgs& a, int64_t tokens, Pool& pool) {
    return multiply_heads<FloatProduct<E>>(a, tokens, pool, sizeof(E));
}

template <class E>
void fill_type(Kernels& table, Type type) {
    table.linear[static_cast<int>(type)] = {linear<E>, grouped<E>};
    table.heads_linear[static_cast<int>(type)] = heads_linear<E>;
}

}  // namespace

// A level that has an instruction for bf16 has nothing new for other types.
void fill_linear(Kernels& table) {
    fill_type<BF16>(table, Type::bf16);
#if !defined(QUIRE_BF16_DOTS)
    fill_type<float>(table, Type::f32);
    fill_type<F16>(table, Type::f16);
#endif
}

}  // namespace quire::QUIRE_LEVEL
