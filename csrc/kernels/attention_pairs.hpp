// Attention in bfloat16 with dot products of pairs: no number is widened.
//
// A score is the sum over pairs of a key's elements, which lie side by side in KV memory; queries
// come as they are, and what scores are multiplied by meets the sums. See attention_means.hpp for
// what comes after.
#pragma once

#include "kernels/attention_means.hpp"

#if defined(QUIRE_BF16_DOTS)

namespace quire::QUIRE_LEVEL {

class Pairs : public PairMeans<BF16> {
   public:
    using Stored = BF16;

    static int64_t num_floats(int64_t rows, int64_t dim) {
        return PairMeans::num_floats(dim) + kSegment * num_pairs(dim) +
               num_groups(rows) * kRows * num_pairs(dim);
    }

    Pairs(float* memory, int64_t rows, int64_t dim) : Pairs(Scratch{memory}, rows, dim) {}

    void fill_group(const QueryRows& from, const GroupRows& rows) const {
        for (int64_t p = 0; p < pairs_; p += kLanes) {
            F32 block[kLanes];
            for (int64_t r = 0; r < kLanes; ++r) {
                block[r] = splat(0);
                if (r >= rows.count) continue;
                const BF16* query = from.at<BF16>(rows.row + r) + 2 * p;
                block[r] = {_mm512_castsi512_ps(load_block(query, dim_ - 2 * p))};
            }
            transpose(block);
            auto* to = reinterpret_cast<float*>(query(rows.row) + p * kRows * 2);
            for (int64_t i = 0; i < least(kLanes, pairs_ - p); ++i)
                store_part(to + i * kRows, kRows, block[i]);
        }
    }

    // Products of a group and the keys of tiles, at room.s.
    template <bool kFetches>
    void score(const GroupRows& rows, const SegmentTiles& tiles, const TileRange& seen,
               const Ahead& ahead) const {
        with_rows(rows.count, [&](auto count) {
            scores<count.value, kFetches>(query(rows.row), tiles, seen, ahead);
        });
    }

    template <class Source>
    void gather_scales(const Source&, int64_t, int64_t, int64_t) const {}
    const float* key_scales() const { return nullptr; }
    const float* value_scales() const { return nullptr; }

    // Keys low..high-1 of a segment in tiles of scratch memory, where their own has none.
    template <class Source>
    void tile_keys(const Source& keys, int64_t segment, int64_t low, int64_t high,
                   SegmentTiles& tiles) const {
        for (int64_t t = 0; t < kTilesOfSegment; ++t) tiles.keys[t] = k_ + t * pairs_ * kPairBlock;
        keys.copy_keys(segment, low, high, k_);
    }

   private:
    static int64_t num_pairs(int64_t dim) { return (dim + 1) / 2; }
    static int64_t num_groups(int64_t rows) { return (rows + kRows - 1) / kRows; }

    Pairs(Scratch memory, int64_t rows, int64_t dim)
        : PairMeans(memory, dim),
          pairs_(num_pairs(dim)),
          k_(memory.take<BF16>(kSegment * pairs_)),
          q_(memory.take<BF16>(num_groups(rows) * kRows * pairs_)) {}

    // The queries of the group from a row on, [pairs of elements][kRows][2].
    BF16* query(int64_t row) const { return q_ + row * pairs_ * 2; }

    template <int R, bool kFetches>
    [[gnu::noinline]] void scores(const BF16* q, const SegmentTiles& tiles, const TileRange& seen,
                                  Ahead ahead) const {
        constexpr int C = at_once(R);
        for (int64_t t = seen.first; t < seen.stop; t += C) {
            const BF16* keys[C];
            const int64_t begin = least(t, kTilesOfSegment - C);  // C tiles are within s
            for (int c = 0; c < C; ++c) {
                const int64_t tile = most(seen.first, least(begin + c, seen.stop - 1));
                keys[c] = static_cast<const BF16*>(tiles.keys[tile]);
            }
            scores_of_tiles<R, C, kFetches>(q, keys, ahead, room.s + begin * kLanes);
        }
    }

    // s[r][tile] = q[r] . keys of C tiles; as much is fetched as is read.
    template <int R, int C, bool kFetches>
    void scores_of_tiles(const BF16* q, const BF16* const* keys, Ahead& ahead, float* s) const {
        F32 sums[R][C];
        each_of<R, C>([&](int r, int c) { sums[r][c] = splat(0); });
        const int64_t pairs = pairs_;
        for (int64_t p = 0; p < pairs; ++p) {
            __m512i key[C];
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) {
                key[c] = _mm512_loadu_si512(keys[c] + p * kPairBlock);
                if constexpr (kFetches) fetch_early(keys[c] + (p + kNear) * kPairBlock);
            }
            if constexpr (kFetches) ahead.fetch<C>();
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const __m512i both = splat_pair(q + (p * kRows + r) * 2);
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) sums[r][c] = add_dots(sums[r][c], key[c], both);
            }
        }
        each_of<R, C>([&](int r, int c) { store(s + r * kSegment + c * kLanes, sums[r][c]); });
    }

    int64_t pairs_;
    BF16* k_;  // keys that do not lie in tiles
    BF16* q_;  // of all groups
};

}  // namespace quire::QUIRE_LEVEL

#endif
