// Dot products of pairs of bfloat16 (vdpbf16ps), at the levels that have them: QUIRE_BF16_DOTS.
#pragma once

#include "kernels/vec.hpp"

#if defined(__AVX512BF16__) || defined(QUIRE_EMULATED_BF16)
#define QUIRE_BF16_DOTS

namespace quire::QUIRE_LEVEL {

// sums += w[k] * x[k] + w[k + 1] * x[k + 1] in every lane, as vdpbf16ps does it.
#if defined(__AVX512BF16__)
inline F32 add_dots(F32 sums, __m512i w, __m512i x) {
    return {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x))};
}
#else
// For tests where there is no such instruction: k + 1 first, as Intel's manual has it. Subnormal
// numbers, which the instruction takes as zeros, keep their values.
inline F32 add_dots(F32 sums, __m512i w, __m512i x) {
    const auto odd = [](__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32(-0x10000)); };
    const auto even = [](__m512i v) { return _mm512_slli_epi32(v, 16); };
    const auto add = [](__m512i a, __m512i b, __m512 sum) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    };
    return {add(even(w), even(x), add(odd(w), odd(x), sums.v))};
}
#endif

// The same pair of numbers in every lane; as a float, or GCC takes the way through a general
// register.
inline __m512i splat_pair(const BF16* p) {
    float both;
    __builtin_memcpy(&both, p, sizeof both);
    return _mm512_castps_si512(_mm512_set1_ps(both));
}

// 32 numbers of bfloat16: those of a, then those of b. Subnormal ones may become zeros.
inline __m512i narrow_both(F32 a, F32 b) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bf16(a)), narrow_bf16(b), 1);
#endif
}

}  // namespace quire::QUIRE_LEVEL

#endif
