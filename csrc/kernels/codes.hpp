// Codes as numbers in fp32: what a code is above its zero point, a whole number.
#pragma once

#include "kernels/pairs.hpp"

namespace quire::QUIRE_LEVEL {

// Where input i of a word lies (coded_panel.hpp).
template <int kBits>
constexpr int shift_of(int i) {
    return kBits == 8 ? 8 * i : i % 2 * 16 + i / 2 * 4;
}

// 16 words of codes, and bits kShift.. of each as a number in fp32, kBits of them.
#if defined(__AVX512F__)
struct CodeWords {
    __m512i v;
};
inline CodeWords load_words(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
template <int kShift>
inline __m512i shifted(CodeWords w) {
    if constexpr (kShift == 0) return w.v;
    return _mm512_srli_epi32(w.v, kShift);
}
template <int kBits, int kShift>
inline F32 field(CodeWords w) {
    const __m512i mask = _mm512_set1_epi32((1 << kBits) - 1);
    return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted<kShift>(w), mask))};
}
inline F32 load_zeros(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
#elif defined(__AVX2__)
struct CodeWords {
    __m256i low, high;
};
inline CodeWords load_words(const uint8_t* from) {
    const auto* at = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
template <int kBits, int kShift>
inline F32 field(CodeWords w) {
    const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w.low, kShift), mask)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w.high, kShift), mask))};
}
inline F32 load_zeros(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
#else
struct CodeWords {
    uint32_t v[kLanes];
};
inline CodeWords load_words(const uint8_t* from) {
    CodeWords w;
    __builtin_memcpy(w.v, from, sizeof w.v);
    return w;
}
template <int kBits, int kShift>
inline F32 field(const CodeWords& w) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i)
        lanes[i] = static_cast<float>(w.v[i] >> kShift & ((1u << kBits) - 1));
    return load(lanes);
}
inline F32 load_zeros(const uint8_t* from) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = from[i];
    return load(lanes);
}
#endif

// Reads the codes of 16 outputs in a group. `zeros` are their zero points; without kHasZeros they
// are all in the middle of the codes.
template <int kBits, bool kHasZeros>
class Codes {
   public:
    void begin(const uint8_t* zeros) {
        zeros_ = kHasZeros ? load_zeros(zeros) : splat(1 << (kBits - 1));
    }

    // Inputs 2 * kPair and the one after it.
    template <int kPair>
    TwoInputs pair(const CodeWords& w) const {
        return {at<shift_of<kBits>(2 * kPair)>(w), at<shift_of<kBits>(2 * kPair + 1)>(w)};
    }

   private:
    template <int kShift>
    F32 at(const CodeWords& w) const {
#if defined(__AVX512F__)
        if constexpr (kBits == 4) {  // a permutation looks at the lowest four bits alone
            constexpr int kMiddle = kHasZeros ? 0 : 8;
            const __m512 numbers = _mm512_setr_ps(
                0 - kMiddle, 1 - kMiddle, 2 - kMiddle, 3 - kMiddle, 4 - kMiddle, 5 - kMiddle,
                6 - kMiddle, 7 - kMiddle, 8 - kMiddle, 9 - kMiddle, 10 - kMiddle, 11 - kMiddle,
                12 - kMiddle, 13 - kMiddle, 14 - kMiddle, 15 - kMiddle);
            const F32 found{_mm512_permutexvar_ps(shifted<kShift>(w), numbers)};
            return kHasZeros ? sub(found, zeros_) : found;
        }
#endif
        return sub(field<kBits, kShift>(w), zeros_);
    }

    F32 zeros_;
};

// Always inlined, since GCC would call it, with its sums in memory.
template <int M, int V>
__attribute__((always_inline)) inline void add_pair(F32 (&sums)[M][V], const float* x,
                                                    const TwoInputs (&w)[V]) {
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
        const F32 even = splat(x[r * kDepth]);
        for (int v = 0; v < V; ++v) sums[r][v] = add_product(sums[r][v], even, w[v].even);
    }
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
        const F32 odd = splat(x[r * kDepth + 1]);
        for (int v = 0; v < V; ++v) sums[r][v] = add_product(sums[r][v], odd, w[v].odd);
    }
}

}  // namespace quire::QUIRE_LEVEL
