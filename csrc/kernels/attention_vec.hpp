// What attention needs of vectors besides vec.hpp: masks by place, 2^x, int8, pairs of bf16.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

struct I8 {
    int8_t value;
};

// How keys and values are stored: elements that come with one load, and vectors of 16 of them.
template <class S>
constexpr int64_t kPack = 1;
template <>
constexpr int64_t kPack<BF16> = 2;
template <>
constexpr int64_t kPack<I8> = 4;

#if defined(__AVX512F__)

// v in the lanes low..high-1, else `other`; 0 <= low, high <= 16.
inline F32 between(F32 v, int64_t low, int64_t high, F32 other) {
    const __mmask16 inside = first_lanes(high) & ~first_lanes(low);
    return {_mm512_mask_mov_ps(other.v, inside, v.v)};
}
inline float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }

// p * 2^n, and 0 where x < limit.
inline F32 scaled_or_zero(F32 x, F32 limit, F32 p, F32 n) {
    const __mmask16 above = _mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(above, p.v, n.v)};
}
inline F32 whole(F32 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT)}; }

inline F32 load(const I8* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}

// 16 pairs: the first of each, and the second.
inline void load_pairs(const BF16* p, F32& first, F32& second) {
    const __m512i pairs = _mm512_loadu_si512(p);
    first = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    second = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
}

// 16 times four bytes: the first of each, the second, and so on.
inline void load_fours(const I8* p, F32* four) {
    const __m512i bytes = _mm512_loadu_si512(p);
    four[0] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24), 24))};
    four[1] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 16), 24))};
    four[2] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 8), 24))};
    four[3] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 24))};
}

// 16 vectors as the rows of a matrix become its columns.
inline void transpose(F32* rows) {
    __m512 pairs[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    __m512 fours[16];  // [4i + j]: of rows 4i .. 4i + 3, the columns j, j + 4, j + 8, j + 12
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        fours[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512 a = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0xdd);
        const __m512 d = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0xdd);
        rows[j].v = _mm512_shuffle_f32x4(a, b, 0x88);
        rows[4 + j].v = _mm512_shuffle_f32x4(c, d, 0x88);
        rows[8 + j].v = _mm512_shuffle_f32x4(a, b, 0xdd);
        rows[12 + j].v = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

#elif defined(__AVX2__)

inline __m256 blend(__m256 v, __m256 other, __m256i mask) {
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(mask));
}
inline F32 between(F32 v, int64_t low, int64_t high, F32 other) {
    const __m256i a = _mm256_andnot_si256(lanes_below(low, 0), lanes_below(high, 0));
    const __m256i b = _mm256_andnot_si256(lanes_below(low, 8), lanes_below(high, 8));
    return {blend(v.low, other.low, a), blend(v.high, other.high, b)};
}
inline float largest(F32 a) {
    const __m256 b = _mm256_max_ps(a.low, a.high);
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
inline F32 scaled_or_zero(F32 x, F32 limit, F32 p, F32 n) {
    return zero_below(x, limit, mul(p, power_of_two(n)));
}
inline F32 whole(F32 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode)};
}

inline F32 load(const I8* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

inline void load_pairs(const BF16* p, F32& first, F32& second) {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    const __m256i a = _mm256_loadu_si256(halves), b = _mm256_loadu_si256(halves + 1);
    const __m256i high = _mm256_set1_epi32(-0x10000);
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
             _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(a, high)),
              _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}

inline __m256 byte_of_fours(__m256i bytes, int place) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - 8 * place), 24));
}
inline void load_fours(const I8* p, F32* four) {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    const __m256i a = _mm256_loadu_si256(halves), b = _mm256_loadu_si256(halves + 1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) four[i] = {byte_of_fours(a, i), byte_of_fours(b, i)};
}

#else

inline F32 between(F32 v, int64_t low, int64_t high, F32 other) {
    const Ints inside = lanes_below(high) & (lanes_below(low) ^ all(-1));
    return {of_bits(choose(inside, bits_of(v.v), bits_of(other.v)))};
}
inline float largest(F32 a) {
    float most = a.v[0];
    for (int i = 1; i < 16; ++i) most = most > a.v[i] ? most : a.v[i];
    return most;
}
inline F32 scaled_or_zero(F32 x, F32 limit, F32 p, F32 n) {
    return zero_below(x, limit, mul(p, power_of_two(max(splat(-126), n))));
}
inline F32 whole(F32 x) { return nearest(max(splat(-1e6f), x)); }

inline F32 load(const I8* p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = p[i].value;
    return load(lanes);
}

inline void load_pairs(const BF16* p, F32& first, F32& second) {
    const Words pairs = load_bits<Words>(p);
    first = {of_bits(pairs << 16)};
    second = {of_bits(pairs & all(0xffff0000u))};
}

inline void load_fours(const I8* p, F32* four) {
    for (int i = 0; i < 4; ++i) {
        float lanes[16];
        for (int lane = 0; lane < 16; ++lane) lanes[lane] = p[lane * 4 + i].value;
        four[i] = load(lanes);
    }
}

#endif

#if !defined(__AVX512F__)
inline void transpose(F32* rows) {
    float from[16][16], to[16];
    for (int i = 0; i < 16; ++i) store(from[i], rows[i]);
    for (int j = 0; j < 16; ++j) {
        for (int i = 0; i < 16; ++i) to[i] = from[i][j];
        rows[j] = load(to);
    }
}
#endif

inline F32 load_part(const I8* p, int64_t n) {
    I8 lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}

// 2^x for x <= 0 within 1.4 * 2^-24 of itself, 1 for 0; 0 below 2^-125; NaN stays. The same bits in
// every lane. The polynomial minimises the largest relative error over -0.5..0.5.
inline F32 exp2(F32 x) {
    const F32 n = whole(x);
    const F32 r = sub(x, n);
    F32 p = splat(1.5353362e-4f);
    p = fma(p, r, splat(1.33988739e-3f));
    p = fma(p, r, splat(9.61843692e-3f));
    p = fma(p, r, splat(5.55033237e-2f));
    p = fma(p, r, splat(2.40226477e-1f));
    p = fma(p, r, splat(6.93147182e-1f));
    p = fma(p, r, splat(1.0f));
    return scaled_or_zero(x, splat(-125.0f), p, n);
}

// The same within 2^-18 of itself, for numbers that are rounded to bfloat16.
inline F32 short_exp2(F32 x) {
    const F32 n = whole(x);
    const F32 r = sub(x, n);
    F32 p = splat(9.58285388e-3f);
    p = fma(p, r, splat(5.59064262e-2f));
    p = fma(p, r, splat(2.40240991e-1f));
    p = fma(p, r, splat(6.93124175e-1f));
    p = fma(p, r, splat(1.0f));
    return scaled_or_zero(x, splat(-125.0f), p, n);
}

// tanh within 3 * 2^-24 of itself: Cephes' polynomial near 0, else from e^(2|x|). Not
// activation.hpp's tanh, which multiplies in another order.
inline F32 score_tanh(F32 x) {
    const F32 zero = splat(0);
    const F32 size = max(x, sub(zero, x));
    const F32 small = min(splat(1), max(splat(-1), x));
    const F32 square = mul(small, small);
    F32 p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    const F32 near = fma(mul(p, square), small, small);
    const F32 far = sub(splat(1), div(splat(2), add(splat(1), exp(add(size, size)))));
    const F32 border = splat(0.625f);
    const F32 chosen_far = zero_below(size, border, far);
    const F32 signed_far =
        sub(zero_below(x, zero, chosen_far), zero_below(sub(zero, x), splat(1e-38f), chosen_far));
    // where |x| >= 0.625 the sum's other part is zero
    const F32 chosen_near = sub(near, zero_below(size, border, near));
    return add(signed_far, chosen_near);
}

}  // namespace quire::QUIRE_LEVEL
