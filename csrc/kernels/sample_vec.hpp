// What sampling needs of vectors besides vec.hpp: masks from comparisons, noise, sums in fp64.
#pragma once

#include "kernels/attention_vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr uint32_t kNoiseFactor = 0x7feb352du;

#if defined(__AVX512F__)

// Bit i is lane i.
inline uint32_t lanes_above(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t lanes_at_least(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t lanes_unordered(F32 a, F32 b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q);
}
// v where x >= limit, else 0.
inline F32 keep_at_least(F32 x, F32 limit, F32 v) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), v.v)};
}
// The 31 noise bits of ops/sampling/noise.py as numbers; `hashes` are integers.
inline F32 noise_bits(F32 hashes, uint32_t a, uint32_t b) {
    const auto all = [](uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); };
    __m512i x = _mm512_xor_si512(_mm512_castps_si512(hashes.v), all(a));
    x = _mm512_mullo_epi32(x, all(kNoiseFactor));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_and_si512(_mm512_mullo_epi32(x, all(b)), all(0x7fffffff));
    return {_mm512_cvtepi32_ps(x)};
}
// The float whose bits are the whole part of x, 0 for x <= 0; x < 2^31.
inline F32 from_bits(F32 x) {
    return {_mm512_castsi512_ps(_mm512_cvttps_epi32(_mm512_max_ps(x.v, _mm512_setzero_ps())))};
}
inline void store_whole(int32_t* p, F32 x) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(x.v)); }

struct F64 {
    __m512d low, high;
};
inline F64 zero64() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline void accumulate(F64& sum, F32 v) {
    sum.low = _mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(v.v)));
    sum.high = _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v.v, 1)));
}

#elif defined(__AVX2__)

template <int kind>
inline uint32_t compare(F32 a, F32 b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, kind));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, kind));
    return static_cast<uint32_t>(low | high << 8);
}
inline uint32_t lanes_above(F32 a, F32 b) { return compare<_CMP_GT_OQ>(a, b); }
inline uint32_t lanes_at_least(F32 a, F32 b) { return compare<_CMP_GE_OQ>(a, b); }
inline uint32_t lanes_unordered(F32 a, F32 b) { return compare<_CMP_UNORD_Q>(a, b); }
inline F32 keep_at_least(F32 x, F32 limit, F32 v) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_GE_OQ), v.low),
            _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_GE_OQ), v.high)};
}
inline __m256 noise_bits(__m256 hashes, uint32_t a, uint32_t b) {
    const auto all = [](uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); };
    __m256i x = _mm256_xor_si256(_mm256_castps_si256(hashes), all(a));
    x = _mm256_mullo_epi32(x, all(kNoiseFactor));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_mullo_epi32(x, all(b)), all(0x7fffffff)));
}
inline F32 noise_bits(F32 hashes, uint32_t a, uint32_t b) {
    return {noise_bits(hashes.low, a, b), noise_bits(hashes.high, a, b)};
}
inline F32 from_bits(F32 x) {
    const F32 least = max(splat(0), x);
    return {_mm256_castsi256_ps(_mm256_cvttps_epi32(least.low)),
            _mm256_castsi256_ps(_mm256_cvttps_epi32(least.high))};
}
inline void store_whole(int32_t* p, F32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(x.low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvttps_epi32(x.high));
}

struct F64 {
    __m256d a, b, c, d;
};
inline F64 zero64() {
    const __m256d zero = _mm256_setzero_pd();
    return {zero, zero, zero, zero};
}
inline void accumulate(F64& sum, F32 v) {
    sum.a = _mm256_add_pd(sum.a, _mm256_cvtps_pd(_mm256_castps256_ps128(v.low)));
    sum.b = _mm256_add_pd(sum.b, _mm256_cvtps_pd(_mm256_extractf128_ps(v.low, 1)));
    sum.c = _mm256_add_pd(sum.c, _mm256_cvtps_pd(_mm256_castps256_ps128(v.high)));
    sum.d = _mm256_add_pd(sum.d, _mm256_cvtps_pd(_mm256_extractf128_ps(v.high, 1)));
}

#else

inline uint32_t lanes_of(const Ints& mask) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= (mask[i] & 1u) << i;
    return bits;
}
inline uint32_t lanes_above(F32 a, F32 b) { return lanes_of(a.v > b.v); }
inline uint32_t lanes_at_least(F32 a, F32 b) { return lanes_of(a.v >= b.v); }
inline uint32_t lanes_unordered(F32 a, F32 b) { return lanes_of((a.v != a.v) | (b.v != b.v)); }
inline F32 keep_at_least(F32 x, F32 limit, F32 v) {
    return {of_bits(choose(x.v >= limit.v, bits_of(v.v), Words{}))};
}
inline F32 noise_bits(F32 hashes, uint32_t a, uint32_t b) {
    const Words x = (bits_of(hashes.v) ^ all(a)) * all(kNoiseFactor);
    return {to_floats(as<Ints>(((x ^ (x >> 15)) * all(b)) & all(0x7fffffffu)))};
}
inline F32 from_bits(F32 x) { return {as<Floats>(to_ints(max(x, splat(0)).v))}; }
inline void store_whole(int32_t* p, F32 x) { store_bits(p, to_ints(x.v)); }

struct F64 {
    double lanes[16];
};
inline F64 zero64() { return {}; }
inline void accumulate(F64& sum, F32 v) {
    for (int i = 0; i < 16; ++i) sum.lanes[i] += static_cast<double>(v.v[i]);
}

#endif

// The lanes added one after the other: the same bits at every level.
inline double total(const F64& sum) {
    double lanes[16], all = 0;
    static_assert(sizeof lanes == sizeof sum);
    __builtin_memcpy(lanes, &sum, sizeof lanes);
    for (double lane : lanes) all += lane;
    return all;
}

}  // namespace quire::QUIRE_LEVEL
