// Whether numbers in memory have NaN among them.
#pragma once

#include "kernels/element.hpp"
#include "kernels/pairs.hpp"

namespace quire::QUIRE_LEVEL {

#if defined(__AVX512F__)
constexpr int64_t kScanVector = 64;
#elif defined(__AVX2__)
constexpr int64_t kScanVector = 32;
#else
constexpr int64_t kScanVector = 16;
#endif
constexpr int64_t kScanSide = 256;  // bytes of the vectors that are looked at side by side
constexpr int64_t kScanVectors = kScanSide / kScanVector;

template <class T>
struct ScanVector {
    typedef T Type __attribute__((vector_size(kScanVector)));
};
template <class T>
using ScanVec = typename ScanVector<T>::Type;

template <class T>
inline ScanVec<T> load_vector(const uint8_t* from) {
    ScanVec<T> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

// Whether a number's bits without the sign are above those of infinity. The bits are compared as
// signed numbers, which without a sign are the same, and which every level can compare.
template <class Bits>
inline bool has_nan(const uint8_t* x, int64_t bytes, Bits magnitude, Bits infinity) {
    ScanVec<Bits> most[kScanVectors] = {};
    int64_t at = 0;
    for (; at + kScanSide <= bytes; at += kScanSide)
#pragma GCC unroll 16
        for (int64_t j = 0; j < kScanVectors; ++j) {
            const ScanVec<Bits> bits = load_vector<Bits>(x + at + j * kScanVector) & magnitude;
            most[j] = bits > most[j] ? bits : most[j];
        }
    Bits largest = 0;
    for (int64_t j = 0; j < kScanVectors; ++j)
        for (int64_t i = 0; i < kScanVector / static_cast<int64_t>(sizeof(Bits)); ++i)
            largest = most[j][i] > largest ? most[j][i] : largest;
    for (; at < bytes; at += sizeof(Bits)) {
        Bits bits;
        __builtin_memcpy(&bits, x + at, sizeof bits);
        bits &= magnitude;
        largest = bits > largest ? bits : largest;
    }
    return largest > infinity;
}

inline bool has_nan(Type type, const uint8_t* x, int64_t bytes) {
    switch (type) {
        case Type::bf16: return has_nan<int16_t>(x, bytes, 0x7fff, 0x7f80);
        case Type::f16: return has_nan<int16_t>(x, bytes, 0x7fff, 0x7c00);
        default: return has_nan<int32_t>(x, bytes, 0x7fffffff, 0x7f800000);
    }
}

// Note it, where that is asked for, if one of the rows that are packed into these lanes has NaN from
// the input `first` on.
template <class E, class Args>
inline void note_nan(const Args& a, const PanelOutputs& outputs, Lanes lanes, int64_t first = 0) {
    if (a.has_nan == nullptr || first == a.weight.in) return;
    for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
        const E* row = row_of<E>(a.source, outputs.first + lane - a.outputs.first, 0) + first;
        const int64_t bytes = (a.weight.in - first) * static_cast<int64_t>(sizeof(E));
        if (has_nan(a.weight.type, reinterpret_cast<const uint8_t*>(row), bytes))
            __atomic_store_n(a.has_nan, 1, __ATOMIC_RELAXED);
    }
}

}  // namespace quire::QUIRE_LEVEL
