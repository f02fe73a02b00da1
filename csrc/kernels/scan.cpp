// What is in the bytes of a tensor: whether one of its numbers is NaN, and sums by which two
// tensors are told apart without a copy of one.

#include "kernels/kernels.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVector = 64;
#elif defined(__AVX2__)
constexpr int64_t kVector = 32;
#else
constexpr int64_t kVector = 16;
#endif
constexpr int64_t kSide = 256;  // bytes of the vectors that are looked at side by side
constexpr int64_t kVectors = kSide / kVector;

template <class T>
struct Vector {
    typedef T Type __attribute__((vector_size(kVector)));
};
template <class T>
using Vec = typename Vector<T>::Type;

template <class T>
inline Vec<T> load(const uint8_t* from) {
    Vec<T> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

// Whether a number's bits without the sign are above those of infinity. The bits are compared as
// signed numbers, which without a sign are the same, and which every level can compare.
template <class Bits>
inline bool has_nan(const uint8_t* x, int64_t bytes, Bits magnitude, Bits infinity) {
    Vec<Bits> most[kVectors] = {};
    int64_t at = 0;
    for (; at + kSide <= bytes; at += kSide)
#pragma GCC unroll 16
        for (int64_t j = 0; j < kVectors; ++j) {
            const Vec<Bits> bits = load<Bits>(x + at + j * kVector) & magnitude;
            most[j] = bits > most[j] ? bits : most[j];
        }
    Bits largest = 0;
    for (int64_t j = 0; j < kVectors; ++j)
        for (int64_t i = 0; i < kVector / static_cast<int64_t>(sizeof(Bits)); ++i)
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

// The sum of the words of 8 bytes of each column of kSide bytes, and the sum of these sums after
// each row, in which a word counts by its place; then those of the columns, each times a number of
// its own. What is missing in the last row is zero.
inline void add_up(const uint8_t* x, int64_t bytes, uint64_t sums[2]) {
    Vec<uint64_t> of_words[kVectors] = {}, of_sums[kVectors] = {};
    const auto add_row = [&](const uint8_t* row) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < kVectors; ++j) {
            of_words[j] += load<uint64_t>(row + j * kVector);
            of_sums[j] += of_words[j];
        }
    };
    int64_t at = 0;
    for (; at + kSide <= bytes; at += kSide) add_row(x + at);
    if (at < bytes) {
        uint8_t last[kSide] = {};
        __builtin_memcpy(last, x + at, bytes - at);
        add_row(last);
    }
    uint64_t words[kSide / 8], summed[kSide / 8];
    __builtin_memcpy(words, of_words, kSide);
    __builtin_memcpy(summed, of_sums, kSide);
    sums[0] = sums[1] = 0;
    for (int64_t j = 0; j < kSide / 8; ++j) {
        const uint64_t factor = (2 * j + 1) * 0x9e3779b97f4a7c15u;
        sums[0] += words[j] * factor;
        sums[1] += summed[j] * factor;
    }
}

Status scan(const ScanArgs& a, int64_t pieces, Pool& pool) {
    parallel(pool, pieces, [&](int64_t piece, int) {
        const int64_t at = piece * kScanPiece, left = a.bytes - at;
        const int64_t bytes = left < kScanPiece ? left : kScanPiece;
        ScanResult& result = a.results[piece];
        result.has_nan = has_nan(a.type, a.data + at, bytes);
        if (a.adds_up) add_up(a.data + at, bytes, result.sums);
    });
    return Status::ok;
}

}  // namespace

void fill_scan(Kernels& table) { table.scan = scan; }

}  // namespace quire::QUIRE_LEVEL
