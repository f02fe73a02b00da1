// Attention of bfloat16 over keys and values of int8.
//
// Scores are dot products of bytes, whose sums of integers are exact: a query becomes whole numbers
// of 16 bits, q = (256 * high + low) * step with two digits of either sign and a power of two that
// makes the largest magnitude of its elements 2^14 to 2^15. So an element changes by 2^-15 of the
// largest one at most, one of bfloat16 that is at least 2^-7 times as large not at all.
//
// Weights have no such digits: the value of a key with a large weight may be zero where those of
// others, with weights of any size, are not. Values become bfloat16 in registers, which is exact,
// and a weight is rounded to bfloat16 together with the scale that its value has.
#pragma once

#include "kernels/attention_means.hpp"

#if defined(QUIRE_BF16_DOTS) && defined(__AVX512VNNI__)

#include "kernels/integers.hpp"
#include "kernels/quantize.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kFourBlock = 4 * kLanes;  // bytes of a vector

// A query's step: beyond 2^15 - 2^7 two digits would not hold its largest magnitude.
inline Steps query_steps(Range range) { return powers_of_two(range, 0x010000, 14); }

class Digits : public PairMeans<I8> {
   public:
    using Stored = I8;

    static int64_t num_floats(int64_t rows, int64_t dim) {
        return PairMeans::num_floats(dim) + 2 * kSegment + kSegment * num_fours(dim) +
               2 * rounded_up(dim, kLanes) / 4 +
               num_groups(rows) * kRows * (2 * num_fours(dim) + 3);
    }

    Digits(float* memory, int64_t rows, int64_t dim) : Digits(Scratch{memory}, rows, dim) {}

    void fill_group(const QueryRows& from, const GroupRows& rows) const {
        for (int64_t r = 0; r < rows.count; ++r) fill(from.at<BF16>(rows.row + r), rows.row + r);
    }

    // Products of a group and the keys of tiles, at room.s.
    template <bool kFetches>
    void score(const GroupRows& rows, const SegmentTiles& tiles, const TileRange& seen,
               const Ahead& ahead) const {
        for (int64_t at = 0; at < rows.count; at += kScoreRows)
            with_count<1, 2, 3, 4, kScoreRows>(rows.count - at, [&](auto count) {
                if (kFetches && at == 0)
                    scores<count.value, kFetches>(rows.row, at, tiles, seen, ahead);
                else
                    scores<count.value, false>(rows.row, at, tiles, seen, ahead);
            });
    }

    void gather_scales(const Keys& keys, int64_t segment, int64_t low, int64_t high) const {
        keys.gather_scales(segment, low, high, key_scales_, value_scales_);
    }
    const float* key_scales() const { return key_scales_; }
    const float* value_scales() const { return value_scales_; }

    // Keys low..high-1 of a segment in tiles of scratch memory, where their own has none.
    template <class Source>
    void tile_keys(const Source& keys, int64_t segment, int64_t low, int64_t high,
                   SegmentTiles& tiles) const {
        for (int64_t t = 0; t < kTilesOfSegment; ++t) tiles.keys[t] = k_ + t * fours_ * kFourBlock;
        keys.copy_keys(segment, low, high, k_);
    }

   private:
    static constexpr int kScoreRows = 6;  // of which registers hold two sums for each of two tiles
    static constexpr int64_t kApart = Interleaved<I8>::kApart;

    static int64_t num_fours(int64_t dim) { return (dim + 3) / 4; }
    static int64_t num_groups(int64_t rows) { return (rows + kRows - 1) / kRows; }
    static constexpr int smaller(int a, int b) { return a < b ? a : b; }

    // Sums with both digits.
    struct Sums {
        Integers high, low;

        F32 number() const { return fma(to_float(high), splat(256), to_float(low)); }
    };

    Digits(Scratch memory, int64_t rows, int64_t dim)
        : PairMeans(memory, dim), fours_(num_fours(dim)) {
        const int64_t all = num_groups(rows) * kRows;
        key_scales_ = memory.take(kSegment);
        value_scales_ = memory.take(kSegment);
        k_ = memory.take<I8>(kSegment * fours_);
        row_ = memory.take<int8_t>(2 * rounded_up(dim, kLanes) / 4);
        q_ = memory.take<int8_t>(all * fours_ * 2);
        steps_ = memory.take(all);
        starts_ = memory.take<int32_t>(all * 2);
        for (int64_t i = 0; i < all * fours_ * 8; ++i) q_[i] = 0;
        for (int64_t i = 0; i < all; ++i) steps_[i] = 0;
        for (int64_t i = 0; i < all * 2; ++i) starts_[i] = 0;
    }

    // Four elements' digits of a row: the high ones, then the low ones.
    int8_t* query(int64_t row, int64_t four) const {
        return q_ + (row / kRows * kRows * fours_ + four * kRows + row % kRows) * 8;
    }

    void fill(const BF16* from, int64_t row) const {
        const Steps steps = query_steps(range_of(from, dim_));
        const int64_t apart = rounded_up(dim_, kLanes);  // the high ones, then the low ones
        int32_t sums[2] = {0, 0};
        each(dim_, [&](auto lanes, int64_t i) {
            const F32 v = mul(get(lanes, from + i), splat(steps.inverse));
            const __m512i q = _mm512_cvtps_epi32(v.v);
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
            const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
            sums[0] += _mm512_reduce_add_epi32(high);
            sums[1] += _mm512_reduce_add_epi32(low);
            const auto put_bytes = [&](int8_t* to, __m512i bytes) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bytes));
            };
            put_bytes(row_ + i, high);
            put_bytes(row_ + apart + i, low);
        });
        for (int64_t p = 0; p < fours_; ++p) {
            __builtin_memcpy(query(row, p), row_ + 4 * p, 4);
            __builtin_memcpy(query(row, p) + 4, row_ + apart + 4 * p, 4);
        }
        steps_[row] = steps.scale;
        // keys count as numbers without a sign, 128 too large
        for (int d = 0; d < 2; ++d) starts_[row * 2 + d] = -128 * sums[d];
    }

    template <int R, bool kFetches>
    [[gnu::noinline]] void scores(int64_t row, int64_t at, const SegmentTiles& tiles,
                                  const TileRange& seen, Ahead ahead) const {
        constexpr int C = smaller(at_once(2 * R), kTilesOfSegment / kApart);
        for (int64_t apart = 0; apart < kApart; ++apart)
            for (int64_t t = apart; t < kTilesOfSegment; t += C * kApart) {
                if (t + (C - 1) * kApart < seen.first || t >= seen.stop) continue;
                const I8* keys[C];
                for (int c = 0; c < C; ++c) {
                    const int64_t tile = most(seen.first, least(t + c * kApart, seen.stop - 1));
                    keys[c] = static_cast<const I8*>(tiles.keys[tile]);
                }
                scores_of_tiles<R, C, kFetches>(row + at, keys, ahead,
                                                room.s + at * kSegment + t * kLanes);
            }
    }

    template <int R, int C, bool kFetches>
    void scores_of_tiles(int64_t row, const I8* const* keys, Ahead& ahead, float* s) const {
        Sums sums[R][C];
        each_of<R, C>([&](int r, int c) {
            const int32_t* start = starts_ + (row + r) * 2;
            sums[r][c] = {splat_int(start[0]), splat_int(start[1])};
        });
        const int8_t* q = query(row, 0);
        const __m512i offset = _mm512_set1_epi8(-128);
        const int64_t fours = fours_;
        for (int64_t p = 0; p < fours; ++p) {
            __m512i key[C];
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) {
                key[c] = _mm512_xor_si512(_mm512_loadu_si512(keys[c] + p * kFourBlock), offset);
                if constexpr (kFetches) fetch_early(keys[c] + (p + kNear) * kFourBlock);
            }
            if constexpr (kFetches) ahead.template fetch<C>();
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Four high = splat_four(q + (p * kRows + r) * 8);
                const Four low = splat_four(q + (p * kRows + r) * 8 + 4);
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) {
                    sums[r][c].high = add_bytes(sums[r][c].high, key[c], high);
                    sums[r][c].low = add_bytes(sums[r][c].low, key[c], low);
                }
            }
        }
        each_of<R, C>([&](int r, int c) {
            store(s + r * kSegment + c * kApart * kLanes,
                  mul(sums[r][c].number(), splat(steps_[row + r])));
        });
    }

    int64_t fours_;
    float *key_scales_, *value_scales_;  // of a segment
    I8* k_;                              // keys that do not lie in tiles
    int8_t* row_;                        // room for the digits of a query
    int8_t* q_;                          // of all groups [fours of elements][kRows][2][4]
    float* steps_;                       // of all rows
    int32_t* starts_;                    // of the sums of all rows [2]
};

}  // namespace quire::QUIRE_LEVEL

#endif
