// What is in the bytes of a tensor: whether one of its numbers is NaN, and sums by which two
// tensors are told apart without a copy of one.

#include "core/line_copy.hpp"
#include "kernels/kernels.hpp"
#include "kernels/scan.hpp"
#include "kernels/transpose.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// The sum of the words of 8 bytes of each column of kScanSide bytes, and the sum of these sums after
// each row, in which a word counts by its place; then those of the columns, each times a number of
// its own. What is missing in the last row is zero.
inline void add_up(const uint8_t* x, int64_t bytes, uint64_t sums[2]) {
    ScanVec<uint64_t> of_words[kScanVectors] = {}, of_sums[kScanVectors] = {};
    const auto add_row = [&](const uint8_t* row) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < kScanVectors; ++j) {
            of_words[j] += load_vector<uint64_t>(row + j * kScanVector);
            of_sums[j] += of_words[j];
        }
    };
    int64_t at = 0;
    for (; at + kScanSide <= bytes; at += kScanSide) add_row(x + at);
    if (at < bytes) {
        uint8_t last[kScanSide] = {};
        __builtin_memcpy(last, x + at, bytes - at);
        add_row(last);
    }
    uint64_t words[kScanSide / 8], summed[kScanSide / 8];
    __builtin_memcpy(words, of_words, kScanSide);
    __builtin_memcpy(summed, of_sums, kScanSide);
    sums[0] = sums[1] = 0;
    for (int64_t j = 0; j < kScanSide / 8; ++j) {
        const uint64_t factor = (2 * j + 1) * 0x9e3779b97f4a7c15u;
        sums[0] += words[j] * factor;
        sums[1] += summed[j] * factor;
    }
}

// Whole lines past the caches, as in transpose.hpp.
inline void copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes) {
    constexpr int64_t line = kLineBytes;
    int64_t at = 0;
    if (is_on_line(to))
        for (; at + line <= bytes; at += line) copy_line_past_caches(from + at, to + at);
    end_copies_past_caches();
    __builtin_memcpy(to + at, from + at, bytes - at);
}

Status scan(const ScanArgs& a, int64_t pieces, Pool& pool) {
    parallel(pool, pieces, [&](int64_t piece, int) {
        const int64_t at = piece * kScanPiece, left = a.bytes - at;
        const int64_t bytes = left < kScanPiece ? left : kScanPiece;
        ScanResult& result = a.results[piece];
        result.has_nan = has_nan(a.type, a.data + at, bytes);
        if (a.adds_up) add_up(a.data + at, bytes, result.sums);
        if (a.copy != nullptr) copy_bytes(a.data + at, a.copy + at, bytes);
    });
    return Status::ok;
}

}  // namespace

void fill_scan(Kernels& table) { table.scan = scan; }

}  // namespace quire::QUIRE_LEVEL
