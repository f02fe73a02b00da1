#include "kernels/finish.hpp"

#include "kernels/activation.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// value(sums, lane of the panel) takes the place of the sums, 16 lanes at a time. Lanes beyond the
// last output hold what is never stored.
template <class Value>
inline void replace(float* sums, int64_t rows, int64_t stride, const Value& value) {
    for (int64_t r = 0; r < rows; ++r, sums += stride)
        for (int64_t i = 0; i < kPanelWidth; i += kLanes) store(sums + i, value(sums + i, i));
}

// `bias` of the first lane, or null.
inline F32 with_bias(const float* sums, const float* bias, int64_t i) {
    const F32 sum = load(sums);
    return bias == nullptr ? sum : add(sum, load(bias + i));
}

inline const float* bias_at(const LinearArgs& a, int64_t lane) {
    return a.weight.bias == nullptr ? nullptr : a.weight.bias + lane;
}

void finish_plain(const LinearArgs& a, int64_t rows, int64_t lane, float* sums, int64_t stride) {
    const float* bias = bias_at(a, lane);
    if (bias == nullptr && a.finish.act == Act::none) return;
    with_act(a.finish.act, [&](auto act) {
        replace(sums, rows, stride, [&](const float* at, int64_t i) {
            return decltype(act)::of(with_bias(at, bias, i));
        });
    });
}

// The sums of the lanes from half on are `up_at` farther.
void finish_gated(const LinearArgs& a, int64_t rows, int64_t lane, float* sums, int64_t stride,
                  int64_t up_at) {
    const float *bias = bias_at(a, lane), *up_bias = bias_at(a, a.weight.out / 2 + lane);
    if (a.finish.kind == FinishKind::limited)
        return replace(sums, rows, stride, [&](const float* at, int64_t i) {
            return limited(with_bias(at, bias, i), with_bias(at + up_at, up_bias, i),
                           a.finish.scale);
        });
    with_act(a.finish.act, [&](auto act) {
        replace(sums, rows, stride, [&](const float* at, int64_t i) {
            return mul(decltype(act)::of(with_bias(at, bias, i)),
                       with_bias(at + up_at, up_bias, i));
        });
    });
}

// The sum is rounded to the type as a product of that type is; the rest is fp32.
void finish_logits(const LinearArgs& a, int64_t rows, int64_t lane, float* sums, int64_t stride) {
    const float* bias = bias_at(a, lane);
    with_type(a.weight.type, [&](auto type) {
        replace(sums, rows, stride,
                [&](const float* at, int64_t i) { return rounded(type, with_bias(at, bias, i)); });
    });
    const F32 scale = splat(a.finish.scale), cap = splat(a.finish.softcap);
    replace(sums, rows, stride, [&](const float* at, int64_t) {
        const F32 v = mul(load(at), scale);
        return a.finish.softcap == 0 ? v : mul(cap, tanh(div(v, cap)));
    });
}

template <class E>
void store_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, int64_t count,
                const float* sums, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r, sums += stride) {
        E* y = row_of<E>(a.y, token + r, 0) + lane;
        each(count, [&](auto lanes, int64_t i) { put(lanes, y + i, load(sums + i)); });
    }
}

}  // namespace

void finish_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, float* sums,
                 int64_t stride, int64_t up_at) {
    const FinishKind kind = a.finish.kind;
    const int64_t width = is_gate(kind) ? a.weight.out / 2 : a.weight.out;
    const int64_t count = width - lane < kPanelWidth ? width - lane : kPanelWidth;
    if (kind == FinishKind::logits) {
        finish_logits(a, rows, lane, sums, stride);
        return store_rows<float>(a, token, rows, lane, count, sums, stride);
    }
    if (is_gate(kind))
        finish_gated(a, rows, lane, sums, stride, up_at);
    else
        finish_plain(a, rows, lane, sums, stride);
    with_type(a.weight.type, [&](auto type) {
        store_rows<decltype(type)>(a, token, rows, lane, count, sums, stride);
    });
}

}  // namespace quire::QUIRE_LEVEL
