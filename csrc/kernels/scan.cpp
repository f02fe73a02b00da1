// What is in the bytes of a tensor: whether one of its numbers is NaN, and sums by which two
// tensors are told apart without a copy of one.

#include "kernels/kernels.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

constexpr int64_t kWords = 16;  // of 8 bytes, side by side in registers
constexpr int64_t kSide = kWords * 8;

// Whether there is a number among `count` whose bits without the sign are above those of infinity.
template <class Bits>
inline bool has_nan(const Bits* x, int64_t count, Bits magnitude, Bits infinity) {
    constexpr int64_t side = kSide / sizeof(Bits);
    Bits most[side] = {};
    int64_t i = 0;
    for (; i + side <= count; i += side)
        for (int64_t j = 0; j < side; ++j) {
            const Bits bits = x[i + j] & magnitude;
            most[j] = bits > most[j] ? bits : most[j];
        }
    for (; i < count; ++i) {
        const Bits bits = x[i] & magnitude;
        most[0] = bits > most[0] ? bits : most[0];
    }
    Bits largest = 0;
    for (int64_t j = 0; j < side; ++j) largest = most[j] > largest ? most[j] : largest;
    return largest > infinity;
}

inline bool has_nan(Type type, const uint8_t* x, int64_t bytes) {
    switch (type) {
        case Type::bf16:
            return has_nan<uint16_t>(reinterpret_cast<const uint16_t*>(x), bytes / 2, 0x7fff,
                                     0x7f80);
        case Type::f16:
            return has_nan<uint16_t>(reinterpret_cast<const uint16_t*>(x), bytes / 2, 0x7fff,
                                     0x7c00);
        default:
            return has_nan<uint32_t>(reinterpret_cast<const uint32_t*>(x), bytes / 4, 0x7fffffff,
                                     0x7f800000);
    }
}

// The sum of the words of each of kWords columns, and the sum of these sums after each row, in
// which a word counts by its place; then those of the columns, each times a number of its own.
inline void add_up(const uint8_t* x, int64_t bytes, uint64_t sums[2]) {
    uint64_t of_words[kWords] = {}, of_sums[kWords] = {};
    for (int64_t at = 0; at < bytes; at += kSide) {
        uint64_t words[kWords] = {};
        __builtin_memcpy(words, x + at, bytes - at < kSide ? bytes - at : kSide);
        for (int64_t j = 0; j < kWords; ++j) {
            of_words[j] += words[j];
            of_sums[j] += of_words[j];
        }
    }
    sums[0] = sums[1] = 0;
    for (int64_t j = 0; j < kWords; ++j) {
        const uint64_t factor = (2 * j + 1) * 0x9e3779b97f4a7c15u;
        sums[0] += of_words[j] * factor;
        sums[1] += of_sums[j] * factor;
    }
}

Status scan(const ScanArgs& a, int64_t pieces, Pool& pool) {
    parallel(pool, pieces, [&](int64_t piece, int) {
        const int64_t at = piece * kScanPiece, left = a.bytes - at;
        const int64_t bytes = left < kScanPiece ? left : kScanPiece;
        ScanResult& result = a.results[piece];
        result.has_nan = a.looks_for_nan && has_nan(a.type, a.data + at, bytes);
        if (a.adds_up) add_up(a.data + at, bytes, result.sums);
    });
    return Status::ok;
}

}  // namespace

void fill_scan(Kernels& table) { table.scan = scan; }

}  // namespace quire::QUIRE_LEVEL
