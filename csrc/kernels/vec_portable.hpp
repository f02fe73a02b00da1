// 16 fp32 lanes in four of the compiler's own vectors (GCC and Clang), for any CPU.
#pragma once

#include <stdint.h>

namespace quire::QUIRE_LEVEL {

// 16 numbers of 4 bytes, in vectors of the size that every CPU has registers for: GCC computes
// longer ones number by number where it has no instruction for the whole.
template <class T>
struct Quarters {
    typedef T Vector __attribute__((vector_size(16)));
    Vector q[4];
    T operator[](int64_t i) const { return q[i / 4][i % 4]; }
};
using Floats = Quarters<float>;
using Words = Quarters<uint32_t>;
using Ints = Quarters<int32_t>;
// 16 numbers of 2 bytes.
struct Halves {
    typedef uint16_t Vector __attribute__((vector_size(16)));
    Vector h[2];
};

struct F32 {
    Floats v;
};

template <class To, class Body>
inline To each_quarter(const Body& body) {
    return {{body(0), body(1), body(2), body(3)}};
}
template <class T>
inline Quarters<T> all(T x) {
    using Vector = typename Quarters<T>::Vector;
    return {{Vector{} + x, Vector{} + x, Vector{} + x, Vector{} + x}};
}

#define QUIRE_OPERATOR(op)                                                         \
    template <class T>                                                             \
    inline Quarters<T> operator op(const Quarters<T>& a, const Quarters<T>& b) {   \
        return each_quarter<Quarters<T>>([&](int i) { return a.q[i] op b.q[i]; }); \
    }
QUIRE_OPERATOR(+)
QUIRE_OPERATOR(-)
QUIRE_OPERATOR(*)
QUIRE_OPERATOR(/)
QUIRE_OPERATOR(&)
QUIRE_OPERATOR(|)
QUIRE_OPERATOR(^)
#undef QUIRE_OPERATOR

// All bits of the lanes where it holds.
#define QUIRE_COMPARISON(op)                                                \
    inline Ints operator op(const Floats& a, const Floats& b) {             \
        return each_quarter<Ints>([&](int i) { return a.q[i] op b.q[i]; }); \
    }
QUIRE_COMPARISON(<)
QUIRE_COMPARISON(>)
QUIRE_COMPARISON(>=)
QUIRE_COMPARISON(!=)
#undef QUIRE_COMPARISON

inline Words operator<<(const Words& a, int n) {
    return each_quarter<Words>([&](int i) { return a.q[i] << n; });
}
inline Words operator>>(const Words& a, int n) {
    return each_quarter<Words>([&](int i) { return a.q[i] >> n; });
}

// The same bits as numbers of another type.
template <class To, class T>
inline To as(const Quarters<T>& a) {
    return each_quarter<To>([&](int i) { return reinterpret_cast<typename To::Vector>(a.q[i]); });
}
inline Words bits_of(const Floats& v) { return as<Words>(v); }
inline Floats of_bits(const Words& v) { return as<Floats>(v); }
inline Ints to_ints(const Floats& v) {
    return each_quarter<Ints>([&](int i) { return __builtin_convertvector(v.q[i], Ints::Vector); });
}
inline Floats to_floats(const Ints& v) {
    return each_quarter<Floats>(
        [&](int i) { return __builtin_convertvector(v.q[i], Floats::Vector); });
}

// a where mask is all ones, b where it is zero.
inline Words choose(const Ints& mask, const Words& a, const Words& b) {
    const Words m = as<Words>(mask);
    return each_quarter<Words>([&](int i) { return (a.q[i] & m.q[i]) | (b.q[i] & ~m.q[i]); });
}
// All bits of the lanes below n.
inline Ints lanes_below(int64_t n) {
    const Ints lane = {{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}};
    const Ints end = all(static_cast<int32_t>(n));
    return each_quarter<Ints>([&](int i) { return lane.q[i] < end.q[i]; });
}

inline F32 splat(float x) { return {all(x)}; }
inline F32 add(F32 a, F32 b) { return {a.v + b.v}; }
inline F32 sub(F32 a, F32 b) { return {a.v - b.v}; }
inline F32 mul(F32 a, F32 b) { return {a.v * b.v}; }
inline F32 div(F32 a, F32 b) { return {a.v / b.v}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }  // with two roundings
// A NaN in b stays.
inline F32 min(F32 a, F32 b) { return {of_bits(choose(a.v < b.v, bits_of(a.v), bits_of(b.v)))}; }
inline F32 max(F32 a, F32 b) { return {of_bits(choose(a.v > b.v, bits_of(a.v), bits_of(b.v)))}; }
// y, and 0 where x < limit.
inline F32 zero_below(F32 x, F32 limit, F32 y) {
    return {of_bits(choose(x.v < limit.v, Words{}, bits_of(y.v)))};
}
// 2^n for whole n in -126..127.
inline F32 power_of_two(F32 n) { return {of_bits((as<Words>(to_ints(n.v)) + all(127u)) << 23)}; }
inline F32 keep_first(F32 a, int64_t n) {
    return {of_bits(choose(lanes_below(n), bits_of(a.v), Words{}))};
}
inline float first(F32 a) { return a.v[0]; }

// Lanes i and i + 8, then i and i + 4, ...
inline float reduce(F32 a) {
    const auto c = (a.v.q[0] + a.v.q[2]) + (a.v.q[1] + a.v.q[3]);
    return (c[0] + c[2]) + (c[1] + c[3]);
}

inline Words widen(const Halves& h) {
    const Halves::Vector zero = {}, a = h.h[0], b = h.h[1];
    return {{reinterpret_cast<Words::Vector>(
                 __builtin_shufflevector(a, zero, 0, 8, 1, 9, 2, 10, 3, 11)),
             reinterpret_cast<Words::Vector>(
                 __builtin_shufflevector(a, zero, 4, 12, 5, 13, 6, 14, 7, 15)),
             reinterpret_cast<Words::Vector>(
                 __builtin_shufflevector(b, zero, 0, 8, 1, 9, 2, 10, 3, 11)),
             reinterpret_cast<Words::Vector>(
                 __builtin_shufflevector(b, zero, 4, 12, 5, 13, 6, 14, 7, 15))}};
}
// The low halves.
inline Halves narrow(const Words& w) {
    const auto low = [&](int i) {
        return __builtin_shufflevector(reinterpret_cast<Halves::Vector>(w.q[i]),
                                       reinterpret_cast<Halves::Vector>(w.q[i + 1]), 0, 2, 4, 6, 8,
                                       10, 12, 14);
    };
    return {{low(0), low(2)}};
}

inline F32 widen_bf16(const Halves& h) { return {of_bits(widen(h) << 16)}; }
// To nearest, ties to even; NaN stays NaN.
inline Halves narrow_bf16(F32 a) {
    const Words bits = bits_of(a.v);
    const Words near = (bits + all(0x7fffu) + (bits >> 16 & all(1u))) >> 16;
    return narrow(choose(a.v != a.v, all(0x7fc0u), near));
}
// The exponent is moved by a multiplication, which also makes subnormals normal.
inline F32 widen_f16(const Halves& h) {
    const Words x = widen(h);
    const Words sign = (x & all(0x8000u)) << 16;
    const Floats scaled = of_bits((x & all(0x7fffu)) << 13) * all(0x1p112f);
    const Words magnitude = bits_of(scaled);
    // infinities and NaN come out as numbers from 2^16 on
    const Words fixed = choose(scaled >= all(0x1p16f), magnitude | all(0x7f800000u), magnitude);
    return {of_bits(sign | fixed)};
}
// To nearest, ties to even; beyond the largest number infinity; NaN stays NaN.
inline Halves narrow_f16(F32 a) {
    const Words bits = bits_of(a.v);
    const Words sign = bits >> 16 & all(0x8000u);
    const Words magnitude = bits & all(0x7fffffffu);
    const Floats value = of_bits(magnitude);
    const Words odd = magnitude >> 13 & all(1u);
    const Words normal = (magnitude - all(112u << 23) + all(0xfffu) + odd) >> 13;
    // below 2^-14 the unit is 2^-24 throughout: adding 0.5 lets the hardware round to it
    const Words small = bits_of(value + all(0.5f)) - all(0x3f000000u);
    Words half = choose(value < all(0x1p-14f), small, normal);
    half = choose(value >= all(65520.0f), all(0x7c00u), half);
    half = choose(a.v != a.v, all(0x7e00u), half);
    return narrow(sign | half);
}

template <class To>
inline To load_bits(const void* p) {
    To bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return bits;
}
template <class From>
inline void store_bits(void* p, const From& bits) {
    __builtin_memcpy(p, &bits, sizeof bits);
}
inline F32 load(const float* p) { return {load_bits<Floats>(p)}; }
inline F32 load(const BF16* p) { return widen_bf16(load_bits<Halves>(p)); }
inline F32 load(const F16* p) { return widen_f16(load_bits<Halves>(p)); }
inline void store(float* p, F32 a) { store_bits(p, a.v); }
inline void store(BF16* p, F32 a) { store_bits(p, narrow_bf16(a)); }
inline void store(F16* p, F32 a) { store_bits(p, narrow_f16(a)); }

// The first n < 16 lanes; the others load as zero and are not stored. Calls, because they are for
// the ends of rows.
template <class E>
[[gnu::noinline]] inline F32 load_part(const E* p, int64_t n) {
    E lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
template <class E>
[[gnu::noinline]] inline void store_part(E* p, int64_t n, F32 a) {
    E lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

}  // namespace quire::QUIRE_LEVEL
