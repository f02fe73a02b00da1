// The non-linearities of feed-forward layers and of capped logits, on 16 lanes.
//
// Every lane is computed alike. Errors are the largest of a float64 comparison over the range.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

inline F32 negative(F32 v) { return sub(splat(0), v); }

// e^-z² * p(t) with t = 1 / (1 + z / 2) is the complementary error function; p is fitted to a
// relative error of 5e-8 on 0..9.5.
inline F32 erfc_of_positive(F32 z) {
    const F32 t = div(splat(1), fma(splat(0.5f), z, splat(1)));
    F32 p = splat(-0.05889127776026726f);
    p = fma(p, t, splat(0.28370440006256104f));
    p = fma(p, t, splat(-0.4853879511356354f));
    p = fma(p, t, splat(0.2759813070297241f));
    p = fma(p, t, splat(-0.025178121402859688f));
    p = fma(p, t, splat(0.20206905901432037f));
    p = fma(p, t, splat(0.24326148629188538f));
    p = fma(p, t, splat(0.28235337138175964f));
    p = fma(p, t, splat(0.28208768367767334f));
    return mul(mul(p, t), exp(negative(mul(z, z))));
}

// Below 0.625 the polynomial of Cephes' tanhf, else 1 - 2 / (e^2|v| + 1).
inline F32 tanh(F32 v) {
    const F32 limit = splat(0.625f), magnitude = max(v, negative(v));
    const F32 x = min(limit, max(negative(limit), v));
    const F32 z = mul(x, x);
    F32 p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    const F32 near = fma(mul(z, x), p, x);
    const F32 far = sub(splat(1), div(splat(2), add(exp(add(magnitude, magnitude)), splat(1))));
    const F32 near_part = sub(near, zero_below(magnitude, limit, near));
    const F32 far_part = zero_below(magnitude, limit, far);
    const F32 positive = zero_below(v, splat(0), far_part);
    return add(near_part, sub(positive, sub(far_part, positive)));
}

struct Identity {
    static F32 of(F32 v) { return v; }
};
struct Silu {
    static F32 of(F32 v) { return mul(v, sigmoid(v)); }
};
// v times the normal distribution below v.
struct Gelu {
    static F32 of(F32 v) {
        const F32 magnitude = max(v, negative(v));
        const F32 tail = mul(splat(0.5f), erfc_of_positive(mul(magnitude, splat(0.70710678f))));
        const F32 upper = zero_below(v, splat(0), sub(splat(1), tail));
        const F32 lower = sub(tail, zero_below(v, splat(0), tail));
        return mul(v, add(upper, lower));
    }
};
// v/2 * (1 + tanh(u)) is v * sigmoid(2u).
struct GeluTanh {
    static F32 of(F32 v) {
        const F32 cubic = fma(mul(mul(v, v), v), splat(0.044715f), v);
        return mul(v, sigmoid(mul(cubic, splat(1.5957691f))));
    }
};
struct Relu {
    static F32 of(F32 v) { return max(splat(0), v); }
};
struct Relu2 {
    static F32 of(F32 v) {
        const F32 positive = max(splat(0), v);
        return mul(positive, positive);
    }
};

// gpt-oss's gate: (up + 1) * gate * sigmoid(1.702 * gate), the gate cut at +limit and up at both.
inline F32 limited(F32 gate, F32 up, float limit) {
    const F32 highest = splat(limit);
    gate = min(highest, gate);
    up = min(highest, max(splat(-limit), up));
    return mul(add(up, splat(1)), mul(gate, sigmoid(mul(gate, splat(1.702f)))));
}

// Call `body` with the type of the activation.
template <class Body>
inline auto with_act(Act act, const Body& body) {
    switch (act) {
        case Act::silu: return body(Silu{});
        case Act::gelu: return body(Gelu{});
        case Act::gelu_tanh: return body(GeluTanh{});
        case Act::relu: return body(Relu{});
        case Act::relu2: return body(Relu2{});
        default: return body(Identity{});
    }
}

}  // namespace quire::QUIRE_LEVEL
