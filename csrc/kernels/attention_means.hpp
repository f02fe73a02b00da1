// Means of values in bfloat16 with dot products of pairs: what attention over memory of bfloat16
// and of int8 have in common.
//
// A mean is the sum over pairs of keys, 2i and 2i + 1 of a segment, of values of bfloat16 (those of
// int8 are exact there) times weights that are rounded to it: a weight alone, relative to the
// segment's largest score, so that its rounding depends on the segment alone.
//
// Values lie key after key. Those of two keys are interleaved on their way into registers.
#pragma once

#include "kernels/attention_groups.hpp"
#include "kernels/dots.hpp"

#if defined(QUIRE_BF16_DOTS)

namespace quire::QUIRE_LEVEL {

constexpr int64_t kPairBlock = 2 * kLanes;  // elements whose pairs are two vectors

// The first `count` elements of a block, zeros after them.
inline __m512i load_block(const BF16* p, int64_t count) {
    if (count >= kPairBlock) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
}

// The pairs of the first `count` elements of two keys' blocks, zeros after them.
template <class S>
struct Interleaved;

// bfloat16 interleaves within 128 bits: [0..3, 8..11, 16..19, 24..27], and the others.
template <>
struct Interleaved<BF16> {
    static constexpr int kApart = 1;
    __m512i low, high;

    Interleaved(const BF16* even, const BF16* odd, int64_t count) {
        const __m512i a = load_block(even, count), b = load_block(odd, count);
        low = _mm512_unpacklo_epi16(a, b);
        high = _mm512_unpackhi_epi16(a, b);
    }

    static void order(F32& low, F32& high) {
        const __m512i first =
            _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second =
            _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const F32 a = {_mm512_permutex2var_ps(low.v, first, high.v)};
        high = {_mm512_permutex2var_ps(low.v, second, high.v)};
        low = a;
    }
};

// Bytes become numbers of fp32, of which the upper halves are all there is.
template <>
struct Interleaved<I8> {
    static constexpr int kApart = 2;  // two tiles of a block share a page
    __m512i low, high;

    Interleaved(const I8* even, const I8* odd, int64_t count)
        : low(pairs(even, odd, count)), high(pairs(even + kLanes, odd + kLanes, count - kLanes)) {}

    static void order(F32&, F32&) {}

   private:
    static __m512i widened(const I8* p, int64_t count) {
        const __m128i bytes = count >= kLanes ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                              : count > 0     ? _mm_maskz_loadu_epi8(first_lanes(count), p)
                                              : _mm_setzero_si128();
        return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    }
    static __m512i pairs(const I8* even, const I8* odd, int64_t count) {
        const __m512i a = _mm512_srli_epi32(widened(even, count), 16), b = widened(odd, count);
        return _mm512_mask_mov_epi16(a, 0xaaaaaaaa, b);
    }
};

// Weights of a group of up to kRows queries, and their means.
template <class S>
class PairMeans {
    using Pair = Interleaved<S>;

   public:
    static constexpr int kRows = 12;
    using Ahead = quire::QUIRE_LEVEL::Ahead<Pair::kApart>;

    static int64_t num_floats(int64_t dim) {
        return GroupRoom::num_floats(kRows) + kRows * kSegment / 2 +
               kSegment * num_blocks(dim) * kLanes + num_blocks(dim) * kLanes +
               Edges<S>::num_floats(dim);
    }

    PairMeans(Scratch& memory, int64_t dim)
        : room(memory, kRows),
          dim_(dim),
          weights_(memory.take<BF16>(kRows * kSegment / 2)),
          v_(memory.take<BF16>(kSegment * num_blocks(dim) * kLanes)),
          zeros_(memory.take<S>(num_blocks(dim) * kLanes)),
          edges_{memory.take<S>(Edges<S>::num_floats(dim)), dim} {
        for (int64_t i = 0; i < num_blocks(dim) * kPairBlock; ++i) zeros_[i] = S{0};
    }

    const GroupRoom room;

    // Scores at room.s to weights relative to room.peaks, 0 where the query of a row sees no key,
    // and to room.sums. Weights meet the scales of values, if there are some, before they are
    // rounded; otherwise the sums are those of what is rounded.
    template <class SightOf>
    void weigh(int64_t count, const SightOf& sight, const TileRange& seen) const {
        for (int64_t r = 0; r < count; ++r)
            store(room.lanes + r * kLanes, weigh_row(sight(r), r, seen));
        store(room.sums, sums_of_lanes(room.lanes));
    }

    // See Edges.
    void cover(SegmentTiles& tiles, int64_t low, int64_t high) const {
        edges_.cover(tiles, low, high);
    }

    // into = the means of the group with the values of all keys of the tiles, straight from memory;
    // or into * keep + means * take. What is ahead is fetched.
    void direct_means(const GroupRows& rows, const SegmentTiles& tiles, Ahead ahead, bool is_first,
                      const Merged& into) const {
        const Direct from{tiles, is_first, into};
        with_rows(rows.count, [&](auto count) {
            constexpr int R = count.value;
            direct_blocks<R, at_once(2 * R)>(from, ahead, 0);
        });
    }

    // Values low..high-1 in order, zeros for the others of their tiles; value(j): where those of a
    // key are.
    template <class Value>
    void pack_values(int64_t low, int64_t high, const Value& value) const {
        const auto at = [&](int64_t j) {
            return j < low || j >= high ? static_cast<const S*>(zeros_) : value(j);
        };
        for (int64_t place = 0; place < kLanes; place += 2)
            for (int64_t t = low / kLanes; t * kLanes < high; ++t) {
                const S *even = at(t * kLanes + place), *odd = at(t * kLanes + place + 1);
                for (int64_t i = 0; i < dim_; i += kPairBlock) {
                    const Pair v(even + i, odd + i, dim_ - i);
                    _mm512_storeu_si512(packed(i, place, t), v.low);
                    _mm512_storeu_si512(packed(i, place, t) + kPairBlock, v.high);
                }
            }
    }

    // The same as direct_means with what pack_values has left.
    void packed_means(const GroupRows& rows, const TileRange& seen, bool is_first,
                      const Merged& into) const {
        with_rows(rows.count,
                  [&](auto count) { packed_blocks<count.value>(rows, seen, is_first, into); });
    }

   protected:
    template <class Body>
    static void with_rows(int64_t count, const Body& body) {
        with_count<1, 2, 3, 4, 6, 8, 10, kRows>(count, body);
    }

    int64_t dim_;

   private:
    struct Direct {
        const SegmentTiles& tiles;
        bool is_first;
        const Merged& into;
    };

    static int64_t num_blocks(int64_t dim) { return (dim + kPairBlock - 1) / kPairBlock; }

    // body(place, tile) for the pairs of keys of tiles in the order in which they add up.
    template <class Body>
    static void each_pair(int64_t first, int64_t stop, const Body& body) {
        constexpr int64_t kApart = Pair::kApart;
        for (int64_t apart = 0; apart < kApart; ++apart)
            for (int64_t place = 0; place < kLanes; place += 2)
                for (int64_t t = first + (apart + first) % kApart; t < stop; t += kApart)
                    body(place, t);
    }

    // The two vectors of values of a pair of keys.
    BF16* packed(int64_t element, int64_t place, int64_t tile) const {
        return v_ + element * kSegment + (place * kTilesOfSegment + tile * 2) * kPairBlock;
    }

    // The sums of the lanes; NaN where a scale is.
    F32 weigh_row(const Sight& sight, int64_t row, const TileRange& tiles) const {
        const SeenVectors seen(sight);
        const float* s = room.s + row * kSegment;
        const F32 peak = splat(room.peaks[row]);
        F32 sum = splat(0);
        const auto weight = [&](int64_t i) {
            if (sight.low >= sight.high || i < seen.first || i >= seen.stop) return splat(0);
            const F32 w = short_exp2(sub(load(s + i), peak));
            if (sight.value_scales == nullptr) return w;
            sum = add(sum, w);
            return where_seen(sight, i, mul(w, load(sight.value_scales + i)), 0);
        };
        const __m512i ones = _mm512_set1_epi32(0x3f803f80);
        for (int64_t i = tiles.first / 2 * kPairBlock; i < tiles.stop * kLanes; i += kPairBlock) {
            const F32 first = weight(i), second = weight(i + kLanes);
            const __m512i both = narrow_both(first, second);
            if (sight.value_scales == nullptr) sum = add_dots(sum, both, ones);
            _mm512_storeu_si512(weights_ + row * kSegment + i, both);
        }
        return sum;
    }

    // From element i on, as many blocks at once as registers hold sums for.
    template <int R, int C>
    [[gnu::noinline]] void direct_blocks(const Direct& from, Ahead& ahead, int64_t i) const {
        for (; i + C * kPairBlock <= dim_; i += C * kPairBlock)
            direct_means_of<R, C, true>(from, ahead, i);
        if (i == dim_) return;
        if constexpr (C > 1)
            direct_blocks<R, C / 2>(from, ahead, i);
        else
            direct_means_of<R, 1, false>(from, ahead, i);
    }

    template <int R, int C, bool kIsWhole>
    void direct_means_of(const Direct& from, Ahead& ahead, int64_t i) const {
        F32 sums[R][C][2];
        each_of<R, C>([&](int r, int c) { sums[r][c][0] = sums[r][c][1] = splat(0); });
        const SegmentTiles& tiles = from.tiles;
        const int64_t dim = dim_;
        Ahead next = ahead;
        each_pair(tiles.first, tiles.stop, [&](int64_t place, int64_t t) {
            const S* even = static_cast<const S*>(tiles.values[t]) + place * dim + i;
            const S* odd = even + dim;
            const BF16* weight = weights_ + t * kLanes + place;
            constexpr int64_t kBytes = C * kPairBlock * sizeof(S);
            next.template fetch<2 * kBytes / kLineBytes>();
            for (int64_t at = 0; at < kBytes; at += kLineBytes) {
                fetch_early(reinterpret_cast<const char*>(even + kNear / 2 * dim) + at);
                fetch_early(reinterpret_cast<const char*>(odd + kNear / 2 * dim) + at);
            }
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) {
                const Pair v(even + c * kPairBlock, odd + c * kPairBlock,
                             kIsWhole ? kPairBlock : dim - i);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const __m512i both = splat_pair(weight + r * kSegment);
                    sums[r][c][0] = add_dots(sums[r][c][0], v.low, both);
                    sums[r][c][1] = add_dots(sums[r][c][1], v.high, both);
                }
            }
        });
        ahead = next;
        each_of<R, C>([&](int r, int c) {
            merge_block(from.into.values + r * from.into.stride + i + c * kPairBlock, sums[r][c][0],
                        sums[r][c][1], from.is_first, r);
        });
    }

    template <int R>
    [[gnu::noinline]] void packed_blocks(const GroupRows& rows, const TileRange& seen,
                                         bool is_first, const Merged& into) const {
        for (int64_t i = 0; i < dim_; i += kPairBlock) {
            F32 sums[R][2];
            each_of<R, 2>([&](int r, int half) { sums[r][half] = splat(0); });
            const BF16 *v = packed(i, 0, 0), *weights = weights_ + rows.at * kSegment;
            each_pair(seen.first, seen.stop, [&](int64_t place, int64_t t) {
                const BF16* pair = v + (place * kTilesOfSegment + t * 2) * kPairBlock;
                const BF16* weight = weights + t * kLanes + place;
                const __m512i low = _mm512_loadu_si512(pair);
                const __m512i high = _mm512_loadu_si512(pair + kPairBlock);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const __m512i both = splat_pair(weight + r * kSegment);
                    sums[r][0] = add_dots(sums[r][0], low, both);
                    sums[r][1] = add_dots(sums[r][1], high, both);
                }
            });
            each_of<R, 1>([&](int r, int) {
                merge_block(into.values + (rows.row + r) * into.stride + i, sums[r][0], sums[r][1],
                            is_first, rows.at + r);
            });
        }
    }

    // values[0..31] = sums of a row of the group; or values * keep + sums * take.
    void merge_block(float* values, F32 low, F32 high, bool is_first, int64_t row) const {
        Pair::order(low, high);
        if (is_first) {
            store(values, low);
            store(values + kLanes, high);
        } else {
            merge_values(values, low, room.keep[row], room.take[row]);
            merge_values(values + kLanes, high, room.keep[row], room.take[row]);
        }
    }

    BF16* weights_;  // of a group [kRows][kSegment]
    BF16* v_;        // values in order: see packed()
    S* zeros_;       // values of a key that is not seen
    Edges<S> edges_;
};

}  // namespace quire::QUIRE_LEVEL

#endif
