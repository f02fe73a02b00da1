// Vectors of 16 fp32 lanes at every level, and what row kernels do with them.
//
// All levels have the same 16 lanes and add them up in the same order, so that AVX2 and AVX-512
// give the same bits (the portable level has no fused multiply-add and rounds once more).
#pragma once

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"

// QUIRE_VECTORS is the level whose vectors this one has: its own, or those of a level before it
// that it adds instructions for products to.
#if defined(__AVX512F__)
#include "kernels/vec_avx512.hpp"
#define QUIRE_VECTORS avx512
#elif defined(__AVX2__)
#include "kernels/vec_avx2.hpp"
#define QUIRE_VECTORS avx2
#else
#include "kernels/vec_portable.hpp"
#define QUIRE_VECTORS portable
#endif

namespace quire::QUIRE_LEVEL {

constexpr int64_t kLanes = 16;

// v rounded to what an element of the type holds.
inline F32 rounded(float, F32 v) { return v; }
inline F32 rounded(BF16, F32 v) { return widen_bf16(narrow_bf16(v)); }
inline F32 rounded(F16, F32 v) { return widen_f16(narrow_f16(v)); }

// Which lanes of a vector belong to the row: all, or the first n.
struct Whole {};
struct Part {
    int64_t n;
};

template <class E>
inline F32 get(Whole, const E* p) {
    return load(p);
}
template <class E>
inline F32 get(Part part, const E* p) {
    return load_part(p, part.n);
}
template <class E>
inline void put(Whole, E* p, F32 v) {
    store(p, v);
}
template <class E>
inline void put(Part part, E* p, F32 v) {
    store_part(p, part.n, v);
}
inline F32 keep(Whole, F32 v) { return v; }
inline F32 keep(Part part, F32 v) { return keep_first(v, part.n); }

// body(lanes, offset) for every vector of a row.
template <class Body>
inline void each(int64_t width, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) body(Whole{}, i);
    if (i < width) body(Part{width - i}, i);
}

// The sum of term(lanes, offset) over a row. Four sums hide the latency of the addition; which
// vector goes into which depends on the width alone.
template <class Term>
inline float total(int64_t width, const Term& term) {
    F32 a = splat(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
        a = add(a, term(Whole{}, i));
        b = add(b, term(Whole{}, i + kLanes));
        c = add(c, term(Whole{}, i + 2 * kLanes));
        d = add(d, term(Whole{}, i + 3 * kLanes));
    }
    for (; i + kLanes <= width; i += kLanes) a = add(a, term(Whole{}, i));
    if (i < width) b = add(b, keep(Part{width - i}, term(Part{width - i}, i)));
    return reduce(add(add(a, b), add(c, d)));
}

// The nearest whole numbers, for |v| < 2^22.
inline F32 nearest(F32 v) {
    const F32 magic = splat(12582912.0f);  // 1.5 * 2^23 leaves no bits for a fraction
    return sub(add(v, magic), magic);
}

// e^v within 2 ulp where that is a normal number; 0 below, at most e^88 above; NaN stays. The
// reduction is Cody and Waite's, the polynomial that of Cephes' expf.
inline F32 exp(F32 v) {
    const F32 lowest = splat(-87.3f);
    const F32 x = min(splat(88.0f), max(lowest, v));
    const F32 n = nearest(mul(x, splat(1.44269504f)));
    F32 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F32 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    const F32 y = add(fma(mul(r, r), p, r), splat(1.0f));
    return zero_below(v, lowest, mul(y, power_of_two(n)));
}

inline F32 sigmoid(F32 v) { return div(splat(1), add(splat(1), exp(sub(splat(0), v)))); }

}  // namespace quire::QUIRE_LEVEL
