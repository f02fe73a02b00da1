// 16 fp32 lanes in two AVX2 registers.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_LEVEL {

struct F32 {
    __m256 low, high;
};

inline F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 add(F32 a, F32 b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline F32 sub(F32 a, F32 b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline F32 mul(F32 a, F32 b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline F32 div(F32 a, F32 b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline F32 fma(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// A NaN in b stays.
inline F32 min(F32 a, F32 b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline F32 max(F32 a, F32 b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
// y, and 0 where x < limit.
inline F32 zero_below(F32 x, F32 limit, F32 y) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_LT_OQ), y.low),
            _mm256_andnot_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_LT_OQ), y.high)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// 2^n for whole n in -126..127.
inline F32 power_of_two(F32 n) { return {power_of_two(n.low), power_of_two(n.high)}; }

// All bits of the lanes start..start+7 that are below n.
inline __m256i lanes_below(int64_t n, int start) {
    const __m256i lane =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(start));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}
inline F32 keep_first(F32 a, int64_t n) {
    return {_mm256_and_ps(a.low, _mm256_castsi256_ps(lanes_below(n, 0))),
            _mm256_and_ps(a.high, _mm256_castsi256_ps(lanes_below(n, 8)))};
}
inline float first(F32 a) { return _mm256_cvtss_f32(a.low); }

// Lanes i and i + 8, then i and i + 4, ...
inline float reduce(F32 a) {
    const __m256 b = _mm256_add_ps(a.low, a.high);
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

inline __m256 widen_bf16(__m128i h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F32 widen_bf16(__m256i h) {
    return {widen_bf16(_mm256_castsi256_si128(h)), widen_bf16(_mm256_extracti128_si256(h, 1))};
}
inline __m256i narrow_bf16(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc0), is_nan);
}
// To nearest, ties to even; NaN stays NaN.
inline __m256i narrow_bf16(F32 a) {
    const __m256i packed = _mm256_packus_epi32(narrow_bf16(a.low), narrow_bf16(a.high));
    return _mm256_permute4x64_epi64(packed, 0b11011000);  // packing went by halves
}
inline F32 widen_f16(__m256i h) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
inline __m256i narrow_f16(F32 a) {
    return _mm256_set_m128i(_mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
}

inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32 load(const BF16* p) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F32 load(const F16* p) {
    return widen_f16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float* p, F32 a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline void store(BF16* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
inline void store(F16* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(a));
}

// The first n < 16 lanes; the others load as zero and are not stored.
inline F32 load_part(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
}
template <class E>
inline F32 load_part(const E* p, int64_t n) {
    E lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
inline void store_part(float* p, int64_t n, F32 a) {
    _mm256_maskstore_ps(p, lanes_below(n, 0), a.low);
    _mm256_maskstore_ps(p + 8, lanes_below(n, 8), a.high);
}
template <class E>
inline void store_part(E* p, int64_t n, F32 a) {
    E lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

}  // namespace quire::QUIRE_LEVEL
