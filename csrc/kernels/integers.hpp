// Dot products of bytes: 16 lanes of int32, each the sum of four products.
//
// Sums of integers have no order, so all levels give the same numbers.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

// Rows and vectors of a register block: with int8 weights, and with int4 weights, which have sums
// in fp32 beside those in int32.
//
// QUIRE_AVX_VNNI: vpdpbusd on 256 bits, or what its definition says.
#if defined(__AVX2__) && !defined(__AVX512F__) && \
    (defined(__AVXVNNI__) || defined(QUIRE_EMULATED_VNNI))
#define QUIRE_AVX_VNNI
#endif
#if defined(__AVX512VNNI__)
constexpr int kByteRows = 12, kNibbleRows = 6, kByteVectors = 2, kNibblePanels = 4;
#elif defined(QUIRE_AVX_VNNI)
constexpr int kByteRows = 6, kNibbleRows = 4, kByteVectors = 1, kNibblePanels = 1;
#elif defined(__AVX2__)
constexpr int kByteRows = 4, kNibbleRows = 4, kByteVectors = 1, kNibblePanels = 1;
#else
constexpr int kByteRows = 1, kNibbleRows = 1, kByteVectors = 1, kNibblePanels = 4;
#endif

// Inputs of int4 weights whose products are added before they become int32: in 16 bits, where there
// is no instruction for the whole, since 8 pairs of 15 * 127 * 2 fit; all groups are multiples. 0:
// no sum is narrow.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(QUIRE_AVX_VNNI)
constexpr int64_t kNarrow = 32;
#else
constexpr int64_t kNarrow = 0;
#endif

#if defined(__AVX512VNNI__)

struct Integers {
    __m512i v;
};
using Bytes = __m512i;

inline Integers splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F32 to_float(Integers a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline void store_int(int32_t* p, Integers a) { _mm512_storeu_si512(p, a.v); }
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_nibbles(Bytes w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes w) { return low_nibbles(_mm512_srli_epi16(w, 4)); }

// What a weight q is stored as, and by how much a sum of products is then too large for each x.
constexpr int32_t kByteOffset = 128;

// Four bytes in every lane; as a float, or GCC takes the way through a general register.
using Four = __m512i;
inline Four splat_four(const int8_t* p) {
    float four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_castps_si512(_mm512_set1_ps(four));
}

// In assembler, because GCC 12 copies the sums around the intrinsic: a third of the speed.
inline Integers add_bytes(Integers sum, Bytes w, Four x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w), "v"(x));
    return sum;
}
inline Integers add_nibbles(Integers sum, Bytes w, Four x) { return add_bytes(sum, w, x); }

#elif defined(__AVX2__)

struct Integers {
    __m256i low, high;
};
using Bytes = Integers;

inline Integers splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F32 to_float(Integers a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Bytes load_bytes(const uint8_t* p) {
    const auto* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline void store_int(int32_t* p, Integers a) {
    auto* to = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(to, a.low);
    _mm256_storeu_si256(to + 1, a.high);
}
inline Bytes low_nibbles(Bytes w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.low, mask), _mm256_and_si256(w.high, mask)};
}
inline Bytes high_nibbles(Bytes w) {
    return low_nibbles({_mm256_srli_epi16(w.low, 4), _mm256_srli_epi16(w.high, 4)});
}

using Four = __m256i;
inline Four splat_four(const int8_t* p) {
    float four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_castps_si256(_mm256_set1_ps(four));
}

#if defined(QUIRE_AVX_VNNI)

constexpr int32_t kByteOffset = 128;

// sum += the products of four unsigned bytes with four signed ones, in every lane.
#if defined(__AVXVNNI__)
inline __m256i add_bytes(__m256i sum, __m256i w, __m256i x) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}
#else
inline __m256i add_bytes(__m256i sum, __m256i w, __m256i x) {
    const __m256i low = _mm256_set1_epi16(0xff);
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#endif
inline Integers add_bytes(Integers sum, Bytes w, Four x) {
    return {add_bytes(sum.low, w.low, x), add_bytes(sum.high, w.high, x)};
}
inline Integers add_nibbles(Integers sum, Bytes w, Four x) { return add_bytes(sum, w, x); }

#else

constexpr int32_t kByteOffset = 0;

inline __m256i add_pairs(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Integers add_pairs(Integers sum, Integers pairs) {
    return {add_pairs(sum.low, pairs.low), add_pairs(sum.high, pairs.high)};
}

// The magnitude of a weight times x with the weight's sign. Weights are at least -128 and x is at
// least -127, so that a pair of products fits into 16 bits; the other way round, -128 would have no
// opposite.
inline __m256i pairs_of(__m256i w, Four x) {
    const __m256i q = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
}
inline Integers add_bytes(Integers sum, Bytes w, Four x) {
    return add_pairs(sum, {pairs_of(w.low, x), pairs_of(w.high, x)});
}

// In 16 bits. In assembler, because GCC 12 adds all pairs of a group as a tree, and keeps them in
// memory for that.
inline __m256i add_pairs_of_nibbles(__m256i sum, __m256i w, Four x) {
    const __m256i pairs = _mm256_maddubs_epi16(w, x);
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(pairs));
    return sum;
}
inline Integers add_nibbles(Integers sum, Bytes w, Four x) {
    return {add_pairs_of_nibbles(sum.low, w.low, x), add_pairs_of_nibbles(sum.high, w.high, x)};
}
// sum + narrow, whose numbers have 16 bits.
inline Integers widened(Integers sum, Integers narrow) { return add_pairs(sum, narrow); }

#endif

#else

struct Integers {
    int32_t v[16];
};
struct Bytes {
    uint8_t v[64];
};

inline Integers splat_int(int32_t x) {
    Integers a;
    for (int32_t& lane : a.v) lane = x;
    return a;
}
inline F32 to_float(Integers a) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(a.v[i]);
    return load(lanes);
}
inline void store_int(int32_t* p, const Integers& a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline Bytes load_bytes(const uint8_t* p) {
    Bytes w;
    __builtin_memcpy(w.v, p, sizeof w.v);
    return w;
}
inline Bytes low_nibbles(Bytes w) {
    for (uint8_t& byte : w.v) byte &= 15;
    return w;
}
inline Bytes high_nibbles(Bytes w) {
    for (uint8_t& byte : w.v) byte >>= 4;
    return w;
}

constexpr int32_t kByteOffset = 128;

struct Four {
    int8_t v[4];
};
inline Four splat_four(const int8_t* p) {
    Four four;
    __builtin_memcpy(four.v, p, 4);
    return four;
}
inline Integers add_bytes(Integers sum, const Bytes& w, Four x) {
    for (int lane = 0; lane < 16; ++lane)
        for (int i = 0; i < 4; ++i) sum.v[lane] += w.v[lane * 4 + i] * x.v[i];
    return sum;
}
inline Integers add_nibbles(Integers sum, const Bytes& w, Four x) { return add_bytes(sum, w, x); }

#endif

}  // namespace quire::QUIRE_LEVEL
