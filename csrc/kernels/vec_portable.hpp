// 16 fp32 lanes in the compiler's own vectors (GCC and Clang), for any CPU.
#pragma once

#include <stdint.h>

namespace quire::QUIRE_LEVEL {

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

struct F32 {
    Floats v;
};

inline Words bits_of(Floats v) { return reinterpret_cast<Words>(v); }
inline Floats of_bits(Words v) { return reinterpret_cast<Floats>(v); }
// a where mask is all ones, b where it is zero.
inline Words choose(Ints mask, Words a, Words b) {
    const Words m = reinterpret_cast<Words>(mask);
    return (a & m) | (b & ~m);
}
inline Words all(uint32_t x) { return Words{} + x; }

inline F32 splat(float x) { return {Floats{} + x}; }
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
inline F32 power_of_two(F32 n) {
    const Ints whole = __builtin_convertvector(n.v, Ints);
    return {reinterpret_cast<Floats>((whole + 127) << 23)};
}
inline F32 keep_first(F32 a, int64_t n) {
    for (int64_t i = n; i < 16; ++i) a.v[i] = 0;
    return a;
}
inline float first(F32 a) { return a.v[0]; }

// Lanes i and i + 8, then i and i + 4, ...
inline float reduce(F32 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}

inline F32 widen_bf16(Halves h) { return {of_bits(__builtin_convertvector(h, Words) << 16)}; }
// To nearest, ties to even; NaN stays NaN.
inline Halves narrow_bf16(F32 a) {
    const Words bits = bits_of(a.v);
    const Words near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector(choose(a.v != a.v, all(0x7fc0), near), Halves);
}
// The exponent is moved by a multiplication, which also makes subnormals normal.
inline F32 widen_f16(Halves h) {
    const Words x = __builtin_convertvector(h, Words);
    const Words sign = (x & 0x8000) << 16;
    const Floats scaled = of_bits((x & 0x7fff) << 13) * 0x1p112f;
    const Words magnitude = bits_of(scaled);
    // infinities and NaN come out as numbers from 2^16 on
    const Words fixed = choose(scaled >= 0x1p16f, magnitude | 0x7f800000, magnitude);
    return {of_bits(sign | fixed)};
}
// To nearest, ties to even; beyond the largest number infinity; NaN stays NaN.
inline Halves narrow_f16(F32 a) {
    const Words bits = bits_of(a.v);
    const Words sign = bits >> 16 & 0x8000;
    const Words magnitude = bits & 0x7fffffff;
    const Floats value = of_bits(magnitude);
    const Words odd = magnitude >> 13 & 1;
    const Words normal = (magnitude - (112u << 23) + 0xfff + odd) >> 13;
    // below 2^-14 the unit is 2^-24 throughout: adding 0.5 lets the hardware round to it
    const Words small = bits_of(value + 0.5f) - 0x3f000000;
    Words half = choose(value < 0x1p-14f, small, normal);
    half = choose(value >= 65520.0f, all(0x7c00), half);
    half = choose(a.v != a.v, all(0x7e00), half);
    return __builtin_convertvector(sign | half, Halves);
}

template <class E>
inline F32 load_part(const E* p, int64_t n);

inline F32 load(const float* p) {
    F32 a;
    __builtin_memcpy(&a.v, p, sizeof a.v);
    return a;
}
template <class E>
inline Halves load_halves(const E* p) {
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    return h;
}
inline F32 load(const BF16* p) { return widen_bf16(load_halves(p)); }
inline F32 load(const F16* p) { return widen_f16(load_halves(p)); }
inline void store(float* p, F32 a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
inline void store(BF16* p, F32 a) {
    const Halves h = narrow_bf16(a);
    __builtin_memcpy(p, &h, sizeof h);
}
inline void store(F16* p, F32 a) {
    const Halves h = narrow_f16(a);
    __builtin_memcpy(p, &h, sizeof h);
}

// The first n < 16 lanes; the others load as zero and are not stored.
template <class E>
inline F32 load_part(const E* p, int64_t n) {
    E lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
template <class E>
inline void store_part(E* p, int64_t n, F32 a) {
    E lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

}  // namespace quire::QUIRE_LEVEL
