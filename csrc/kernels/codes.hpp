// Codes as numbers in fp32: what a code is above its zero point, a whole number, or an 8-bit float,
// or one of 16 numbers.
#pragma once

#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"

namespace quire::QUIRE_LEVEL {

// Where input i of a word lies (coded_panel.hpp).
template <int kBits>
constexpr int shift_of(int i) {
    return kBits == 8 ? 8 * i : i % 2 * 16 + i / 2 * 4;
}

// 16 words of codes, and bits kShift.. of each as a number in fp32: kBits of them as a whole
// number, or an e4m3 as 2^-8 times its value. The exponent of that moves to where fp32 has it, and
// 112 is added to it. A number below 2^-6, whose exponent is 0, then has a one too many before its
// fraction, and is twice what it becomes less the one.
constexpr float kSmallFloat = 1.0f / 256;
constexpr float kLeastNormal = kSmallFloat / 64;
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
template <int kShift>
inline F32 small_float(CodeWords w) {
    const __m512i top = kShift == 24 ? w.v : _mm512_slli_epi32(w.v, 24 - kShift);
    const __m512i spread = _mm512_srai_epi32(top, 4);
    const __m512i sign_and_rest = _mm512_set1_epi32(static_cast<int>(0x87f00000));
    const __m512i exponent = _mm512_set1_epi32(112 << 23);
    const __m512 with_one =  // (spread & sign_and_rest) | exponent
        _mm512_castsi512_ps(_mm512_ternarylogic_epi32(spread, sign_and_rest, exponent, 0xea));
    // the larger magnitude with the sign of the first: with_one itself where it is a normal number
    const __m512 other = _mm512_range_ps(with_one, _mm512_set1_ps(kLeastNormal), 3);
    return {_mm512_fmsub_ps(_mm512_set1_ps(2), with_one, other)};
}
template <int kShift>
inline F32 looked_up(CodeWords w, F32 table) {  // by the lowest four bits
    return {_mm512_permutexvar_ps(shifted<kShift>(w), table.v)};
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
template <int kShift>
inline __m256 small_float(__m256i w) {
    const __m256i moved =
        kShift == 24 ? _mm256_srli_epi32(w, 4) : _mm256_slli_epi32(w, 20 - kShift);
    const __m256i rest = _mm256_and_si256(moved, _mm256_set1_epi32(0x07f00000));
    const __m256 with_one =
        _mm256_castsi256_ps(_mm256_or_si256(rest, _mm256_set1_epi32(112 << 23)));
    const __m256 without =
        _mm256_fmsub_ps(_mm256_set1_ps(2), with_one, _mm256_set1_ps(kLeastNormal));
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 24 - kShift)),
                                      _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(_mm256_min_ps(with_one, without), sign);
}
template <int kShift>
inline F32 small_float(CodeWords w) {
    return {small_float<kShift>(w.low), small_float<kShift>(w.high)};
}
template <int kShift>
inline __m256 looked_up(__m256i w, F32 table) {  // by three bits, and by the fourth in which half
    const __m256i place = _mm256_srli_epi32(w, kShift);
    const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - kShift));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, place),
                            _mm256_permutevar8x32_ps(table.high, place), half);
}
template <int kShift>
inline F32 looked_up(CodeWords w, F32 table) {
    return {looked_up<kShift>(w.low, table), looked_up<kShift>(w.high, table)};
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
template <int kShift>
inline F32 small_float(const CodeWords& w) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t code = w.v[i] >> kShift, bits = (code & 127) << 20 | 112u << 23;
        float with_one;
        __builtin_memcpy(&with_one, &bits, sizeof bits);
        const float without = 2 * with_one - kLeastNormal;
        const float number = with_one < without ? with_one : without;
        lanes[i] = code & 128 ? -number : number;
    }
    return load(lanes);
}
template <int kShift>
inline F32 looked_up(const CodeWords& w, F32 table) {
    float numbers[16], lanes[kLanes];
    store(numbers, table);
    for (int i = 0; i < kLanes; ++i) lanes[i] = numbers[w.v[i] >> kShift & 15];
    return load(lanes);
}
inline F32 load_zeros(const uint8_t* from) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = from[i];
    return load(lanes);
}
#endif

// Reads the codes of 16 outputs in a group. `zeros` are their zero points; without kHasZeros they
// are all in the middle of the codes. Floats have none, nor have the 16 numbers of a table.
template <WeightForm kForm, bool kHasZeros>
class Codes {
    static constexpr int kBits = bits_of(kForm);
    static constexpr bool kAreFloats = kForm == WeightForm::floats8;
    static constexpr bool kHasTable = kForm == WeightForm::table4;

   public:
    // What the numbers are multiplied with, next to their scales.
    static constexpr float kUnit = kAreFloats ? 1 / kSmallFloat : 1;

    void begin(const uint8_t* zeros, const float* table) {
        if constexpr (kHasTable)
            numbers_ = load(table);
        else
            numbers_ = kHasZeros ? load_zeros(zeros) : splat(1 << (kBits - 1));
    }

    // Inputs 2 * kPair and the one after it.
    template <int kPair>
    TwoInputs pair(const CodeWords& w) const {
        return {at<shift_of<kBits>(2 * kPair)>(w), at<shift_of<kBits>(2 * kPair + 1)>(w)};
    }

   private:
    template <int kShift>
    F32 at(const CodeWords& w) const {
        if constexpr (kAreFloats) return small_float<kShift>(w);
        if constexpr (kHasTable) return looked_up<kShift>(w, numbers_);
#if defined(__AVX512F__)
        if constexpr (kBits == 4) {  // a permutation looks at the lowest four bits alone
            constexpr int kMiddle = kHasZeros ? 0 : 8;
            const __m512 numbers = _mm512_setr_ps(
                0 - kMiddle, 1 - kMiddle, 2 - kMiddle, 3 - kMiddle, 4 - kMiddle, 5 - kMiddle,
                6 - kMiddle, 7 - kMiddle, 8 - kMiddle, 9 - kMiddle, 10 - kMiddle, 11 - kMiddle,
                12 - kMiddle, 13 - kMiddle, 14 - kMiddle, 15 - kMiddle);
            const F32 found{_mm512_permutexvar_ps(shifted<kShift>(w), numbers)};
            return kHasZeros ? sub(found, numbers_) : found;
        }
#endif
        return sub(field<kBits, kShift>(w), numbers_);
    }

    F32 numbers_;  // zero points, or the table
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
