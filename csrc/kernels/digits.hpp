// Rows of activations as whole numbers, for exact products with codes.
//
// The inputs of a group, those that share a scale of each output, have one step, a power of two:
// x = q * step. Three bytes of either sign are the digits of q to base 256:
// q = d[0] + 256 * d[1] + 65536 * d[2]. The largest magnitude of a group becomes a q of 2^22 or
// nearly, so that x changes by 2^-22 of it at most. Numbers of bfloat16 that are at least 2^-14
// times as large as the largest one do not change at all, and neither do those of float16 from
// 2^-11 on. A value that is not finite makes the step NaN, and so the row's whole output.
//
// A q of 2^15 or more has no lowest digit if x was a bfloat16, which has 8 bits. So of most groups
// few inputs have one: those less than 2^-7 times as large as the largest.
#pragma once

#include "kernels/element.hpp"
#include "kernels/integers.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"
#include "kernels/quantize.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int kDigits = 3;
constexpr uint32_t kDigitBits = 22;  // of the largest q after its first one
// Added to a number in fp32, this carries into its exponent where q would otherwise be more than
// 0x7f7f7f, the most that three digits can be.
constexpr uint32_t kBeyondDigits = 0x010101;

// A group's step, and by what its values are multiplied to become whole numbers.
inline Steps digit_steps(Range range) { return powers_of_two(range, kBeyondDigits, kDigitBits); }

// The nearest whole numbers, of no meaning for NaN and infinities; the lowest byte of each, in
// order; and what is left above these bytes as digits of either sign.
#if defined(__AVX512F__)
inline Integers nearest_integers(F32 v) { return {_mm512_cvtps_epi32(v.v)}; }
inline __m128i low_bytes(Integers q) { return _mm512_cvtepi32_epi8(q.v); }
inline Integers above_digit(Integers q) {
    return {_mm512_srai_epi32(_mm512_add_epi32(q.v, _mm512_set1_epi32(128)), 8)};
}
#else
inline Integers nearest_integers(F32 v) {
    return {_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)};
}
inline __m128i low_bytes(Integers q) {
    const __m256i mask = _mm256_set1_epi32(255);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(q.low, mask), _mm256_and_si256(q.high, mask));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0b11011000);  // packing went by halves
    return _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}
inline __m256i above_digit(__m256i q) {
    return _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
}
inline Integers above_digit(Integers q) { return {above_digit(q.low), above_digit(q.high)}; }
#endif

// The digits of some inputs in the order in which a word of codes has them, whole vectors of them:
// each digit `apart` bytes after the one before it. sums: of each digit.
template <int kBits>
inline void store_digits(const float* x, int64_t count, float inverse, int8_t* at, int64_t apart,
                         int32_t* sums) {
    // of eight inputs, the lower halves of a word's bytes, then the upper ones (coded_panel.hpp)
    const __m128i of_halves = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i flip = _mm_set1_epi8(-128), zero = _mm_setzero_si128();
    __m128i totals[kDigits] = {zero, zero, zero};
    int64_t vectors = 0;
    for (int64_t i = 0; i < count; i += kLanes, ++vectors) {
        Integers q = nearest_integers(mul(load(x + i), splat(inverse)));
        for (int d = 0; d < kDigits; ++d, q = above_digit(q)) {
            __m128i bytes = low_bytes(q);
            totals[d] = _mm_add_epi64(totals[d], _mm_sad_epu8(_mm_xor_si128(bytes, flip), zero));
            if constexpr (kBits == 4) bytes = _mm_shuffle_epi8(bytes, of_halves);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(at + d * apart + i), bytes);
        }
    }
    for (int d = 0; d < kDigits; ++d) {
        const __m128i total = _mm_add_epi64(totals[d], _mm_unpackhi_epi64(totals[d], totals[d]));
        sums[d] = static_cast<int32_t>(_mm_cvtsi128_si32(total) - 128 * kLanes * vectors);
    }
}

}  // namespace quire::QUIRE_LEVEL
