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
        return FloatRows<E>::num_bytes(a.weight.in, rows);
    }

    FloatProduct(const LinearArgs& a, int64_t rows, void* memory)
        : weight_(a.weight),
          x_{a.weight.in, rows, static_cast<typename Dots<E>::X*>(memory)} {}

    void prepare(int64_t row, const E* x) const { x_.prepare(row, x); }

    template <int P>
    void multiply(int64_t panel, float* sums, int64_t stride, int64_t apart) const {
        const int64_t panel_size = (weight_.in + 1) / 2 * 2 * kPanel;
        const E* weight = static_cast<const E*>(weight_.panels) + panel * panel_size;
        x_.template multiply<P>(sums, stride, Apart{panel_size, apart},
                                [&](int64_t pair, int64_t) { return weight + pair * 2 * kPanel; });
    }

   private:
    const PackedWeight& weight_;
    const FloatRows<E> x_;
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
