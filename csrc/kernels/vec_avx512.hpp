// 16 fp32 lanes in one AVX-512 register.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_LEVEL {

struct F32 {
    __m512 v;
};

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

inline F32 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in b stays.
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
// y, and 0 where x < limit.
inline F32 zero_below(F32 x, F32 limit, F32 y) {
    const __mmask16 low = _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ);
    return {_mm512_mask_mov_ps(y.v, low, _mm512_setzero_ps())};
}
// 2^n for whole n in -126..127.
inline F32 power_of_two(F32 n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline F32 keep_first(F32 a, int64_t n) { return {_mm512_maskz_mov_ps(first_lanes(n), a.v)}; }
inline float first(F32 a) { return _mm512_cvtss_f32(a.v); }

// Lanes i and i + 8, then i and i + 4, ...
inline float reduce(F32 a) {
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

inline F32 widen_bf16(__m256i h) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// To nearest, ties to even; NaN stays NaN. (vcvtneps2bf16 would turn subnormals to zero.)
inline __m256i narrow_bf16(F32 a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(near, is_nan, _mm512_set1_epi32(0x7fc0)));
}
inline F32 widen_f16(__m256i h) { return {_mm512_cvtph_ps(h)}; }
inline __m256i narrow_f16(F32 a) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load(const BF16* p) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F32 load(const F16* p) {
    return widen_f16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline void store(BF16* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
inline void store(F16* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(a));
}

// The first n < 16 lanes; the others load as zero and are not stored.
inline F32 load_part(const float* p, int64_t n) {
    return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
inline F32 load_part(const BF16* p, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline F32 load_part(const F16* p, int64_t n) {
    return widen_f16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline void store_part(float* p, int64_t n, F32 a) {
    _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
inline void store_part(BF16* p, int64_t n, F32 a) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}
inline void store_part(F16* p, int64_t n, F32 a) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16(a));
}

}  // namespace quire::QUIRE_LEVEL
