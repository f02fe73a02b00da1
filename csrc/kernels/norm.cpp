// The norms of one row; the rounding of each kind is that of ops/norm.py.

#include "kernels/norm.hpp"

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// A finished norm of one row: (v - mean) * rstd, then the parameters.
template <class E, NormKind K>
struct RowNorm {
    static constexpr bool is_layer = K >= NormKind::layer;
    const E* weight;
    const E* bias;
    F32 mean;
    F32 rstd;

    template <class Lanes>
    F32 operator()(Lanes lanes, int64_t i, F32 v) const {
        if constexpr (is_layer) v = sub(v, mean);
        v = mul(v, rstd);
        if constexpr (K == NormKind::rms) v = rounded(E{}, v);
        if (weight != nullptr) v = mul(v, factor(get(lanes, weight + i)));
        if (bias == nullptr) return v;
        if constexpr (!is_layer) v = rounded(E{}, v);
        return add(v, get(lanes, bias + i));
    }

    static F32 factor(F32 w) {
        if constexpr (K == NormKind::rms1p) w = add(w, splat(1));
        if constexpr (K == NormKind::layer1p) w = rounded(E{}, add(w, splat(1)));
        return w;
    }
};

template <class E, NormKind K>
inline RowNorm<E, K> row_norm(const E* x, int64_t width, const NormParams& p, int64_t row) {
    const auto* weight = static_cast<const E*>(p.weight);
    const auto* bias = static_cast<const E*>(p.bias);
    const int64_t at = row * p.param_stride;
    const float count = static_cast<float>(width);
    F32 mean = splat(0);
    if constexpr (K >= NormKind::layer)
        mean =
            splat(total(width, [&](auto lanes, int64_t i) { return get(lanes, x + i); }) / count);
    const float squares = total(width, [&](auto lanes, int64_t i) {
        F32 v = get(lanes, x + i);
        if constexpr (K >= NormKind::layer) v = sub(v, mean);
        return mul(v, v);
    });
    const F32 rstd = splat(1.0f / __builtin_sqrtf(squares / count + p.eps));
    return {weight ? weight + at : nullptr, bias ? bias + at : nullptr, mean, rstd};
}

// y = norm(x) of one row.
template <class E, NormKind K>
void norm_row(const E* x, E* y, int64_t width, const NormParams& p, int64_t row) {
    const RowNorm<E, K> norm = row_norm<E, K>(x, width, p, row);
    each(width,
         [&](auto lanes, int64_t i) { put(lanes, y + i, norm(lanes, i, get(lanes, x + i))); });
}

template <NormKind K>
struct Kind {
    static constexpr NormKind value = K;
};

// Call `body` with the kind as a type.
template <class Body>
inline auto with_kind(NormKind kind, const Body& body) {
    switch (kind) {
        case NormKind::rms: return body(Kind<NormKind::rms>{});
        case NormKind::rms_late_cast: return body(Kind<NormKind::rms_late_cast>{});
        case NormKind::rms1p: return body(Kind<NormKind::rms1p>{});
        case NormKind::layer: return body(Kind<NormKind::layer>{});
        case NormKind::layer1p: return body(Kind<NormKind::layer1p>{});
        default: return body(Kind<NormKind::none>{});
    }
}

}  // namespace

template <class E>
NormRow<E> norm_row_of(NormKind kind) {
    return with_kind(kind, [](auto k) -> NormRow<E> { return norm_row<E, k.value>; });
}

template NormRow<float> norm_row_of<float>(NormKind);
template NormRow<BF16> norm_row_of<BF16>(NormKind);
template NormRow<F16> norm_row_of<F16>(NormKind);

}  // namespace quire::QUIRE_LEVEL
