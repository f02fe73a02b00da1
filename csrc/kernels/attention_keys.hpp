// The queries of a tile, and the keys and values of one KV head that they look at.
#pragma once

#include "kernels/attention_softmax.hpp"
#include "kernels/kv.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kTilesOfSegment = kSegment / kLanes;
constexpr int64_t kLineBytes = 64;  // bytes that caches hold together

template <int N>
struct Count {
    static constexpr int value = N;
};

// The tiles of keys and values of a segment.
struct SegmentTiles {
    const void* keys[kTilesOfSegment];
    const void* values[kTilesOfSegment];
    const float* key_scales[kTilesOfSegment];  // of bytes
    const float* value_scales[kTilesOfSegment];
    int64_t first, stop;  // which tiles hold keys that are seen
};

// Where the keys and values of one row and KV head are.
struct Keys {
    Type type;  // of the step's activations
    const KVMemory& kv;
    const int32_t* blocks;
    int64_t head;
    int32_t* flaw;  // set where a block id is no block's

    char* block_at(int64_t position) const {
        int64_t block = blocks[position / kv.block_size];
        if (static_cast<uint64_t>(block) >= static_cast<uint64_t>(kv.num_blocks)) {
            __atomic_store_n(flaw, 1, __ATOMIC_RELAXED);
            block = 0;  // memory that may be read; the result is not used
        }
        return head_of(kv, block, head);
    }
    int64_t offset(int64_t position) const { return position % kv.block_size; }

    // Whether 16 keys of a segment are a tile in memory.
    bool has_tiles() const { return kv.tile == kLanes; }
    int64_t dim() const { return kv.head_dim; }
    bool has_scales() const { return kv.is_int8; }
    // Of the keys or the values of a tile.
    int64_t tile_bytes() const {
        const int64_t size = kv.is_int8 ? 1 : size_of(type);
        return kLanes * kv.head_dim * size;
    }

    template <class S>
    const S* value(int64_t position) const {
        return value_of<S>(kv, block_at(position), offset(position));
    }

    // Whether none of a key's values is NaN or infinite; those of bytes are finite, and their
    // scales meet no weight of 0.
    template <class S>
    bool has_finite_value(int64_t position) const {
        if constexpr (__is_same(S, I8)) return true;
        const S* from = value<S>(position);
        F32 nothing = splat(0);
        each(dim(), [&](auto lanes, int64_t i) {
            nothing = fma(get(lanes, from + i), splat(0), nothing);
        });
        return reduce(nothing) == 0;
    }

    // The tiles of the keys low..high-1 of a segment.
    void find(int64_t segment, int64_t low, int64_t high, SegmentTiles& tiles) const {
        tiles.first = low / kLanes;
        tiles.stop = (high + kLanes - 1) / kLanes;
        with_stored(type, kv, [&](auto stored) {
            using S = decltype(stored);
            for (int64_t t = tiles.first; t < tiles.stop; ++t) {
                const int64_t position = segment + t * kLanes;
                char* at = block_at(position);
                tiles.keys[t] = key_of<S>(kv, at, offset(position));
                tiles.values[t] = value_of<S>(kv, at, offset(position));
                if constexpr (!__is_same(S, I8)) continue;
                tiles.key_scales[t] = key_scales_of(kv, at) + offset(position);
                tiles.value_scales[t] = value_scales_of(kv, at) + offset(position);
            }
            // those that are not looked at may be fetched
            for (int64_t t = 0; t < kTilesOfSegment; ++t)
                if (t < tiles.first || t >= tiles.stop) {
                    tiles.keys[t] = tiles.keys[tiles.first];
                    tiles.values[t] = tiles.values[tiles.first];
                }
        });
    }

    // The scales of the keys and values low..high-1 of a segment, and of others of their tiles.
    void gather_scales(int64_t segment, int64_t low, int64_t high, float* of_keys,
                       float* of_values) const {
        SegmentTiles tiles;
        if (has_tiles()) {
            find(segment, low, high, tiles);
            for (int64_t t = tiles.first; t < tiles.stop; ++t) {
                store(of_keys + t * kLanes, load(tiles.key_scales[t]));
                store(of_values + t * kLanes, load(tiles.value_scales[t]));
            }
            return;
        }
        for (int64_t j = low; j < high; ++j) {
            char* at = block_at(segment + j);
            of_keys[j] = key_scales_of(kv, at)[offset(segment + j)];
            of_values[j] = value_scales_of(kv, at)[offset(segment + j)];
        }
    }

    // The keys low..high-1 of a segment into tiles of 16 at `to`, as KV memory has them.
    template <class S>
    void copy_keys(int64_t segment, int64_t low, int64_t high, S* to) const {
        const int64_t packs = (dim() + kPack<S> - 1) / kPack<S>;
        for (int64_t j = low; j < high; ++j) {
            const S* key = key_of<S>(kv, block_at(segment + j), offset(segment + j));
            S* tile = to + (j / kLanes * packs * kLanes + j % kLanes) * kPack<S>;
            for (int64_t p = 0; p < packs; ++p)
                __builtin_memcpy(tile + p * kLanes * kPack<S>, key + p * kv.tile * kPack<S>,
                                 kPack<S> * sizeof(S));
        }
    }
};

// Where the numbers of queries are: row r is head first_head + r % per_kv of token
// first_token + r / per_kv.
struct QueryRows {
    const Rows& q;
    int64_t first_token, first_head, per_kv;

    template <class E>
    const E* at(int64_t row) const {
        return row_of<E>(q, first_token + row / per_kv, first_head + row % per_kv);
    }
    // A query in fp32, in `to` [dim].
    void load(Type type, int64_t dim, int64_t row, float* to) const {
        with_type(type, [&](auto element) {
            const auto* from = at<decltype(element)>(row);
            each(dim, [&](auto lanes, int64_t i) { put(lanes, to + i, get(lanes, from + i)); });
        });
    }
};

// Queries of one KV head: row r is head r % per_kv of the token at position first + r / per_kv.
struct Queries {
    int64_t rows;
    int64_t per_kv;
    int64_t first;
    int64_t window;       // 0: none
    const float* slopes;  // [per_kv], times log2(e)
    int64_t length = 0;   // tokens of a prompt whose queries see what follows them; 0: they do not
    // All queries see the keys up to whole_stop, where it is not 0, and those from whole_start on,
    // whatever the window is.
    int64_t whole_start = 0, whole_stop = 0;

    int64_t position(int64_t row) const { return first + row / per_kv; }
    int64_t stop() const { return high(position(rows - 1)); }
    // The end of the keys that the token at a position sees.
    int64_t high(int64_t position) const {
        if (whole_stop > 0) return whole_stop;
        if (length == 0) return position + 1;
        return window > 0 ? least(length, position + window) : length;
    }
    // The first key that the token at a position sees.
    int64_t low(int64_t position) const {
        const int64_t low = window > 0 ? most(0, position - window + 1) : 0;
        return whole_stop > 0 ? least(low, whole_start) : low;
    }
    Sight sight(int64_t row, int64_t segment, const float* key_scales,
                const float* value_scales) const {
        const int64_t p = position(row);
        return {most(0, low(p) - segment),
                least(kSegment, high(p) - segment),
                slopes[row % per_kv],
                static_cast<float>(segment - p),
                key_scales,
                value_scales};
    }

    // Whether all of `count` rows may be multiplied with all values of a segment that one of them
    // sees, up to whole `unit`s of keys: a weight of 0 makes nothing of a number, but NaN of what
    // is not finite. is_finite(j): of the values of key j.
    template <class IsFinite>
    bool can_share_values(int64_t row, int64_t count, int64_t segment, int64_t unit,
                          const IsFinite& is_finite) const {
        const Sight first = sight(row, segment, nullptr, nullptr);
        const Sight last = sight(row + count - 1, segment, nullptr, nullptr);
        const auto are_finite = [&](int64_t low, int64_t high) {
            for (int64_t j = low; j < high; ++j)
                if (!is_finite(j)) return false;
            return true;
        };
        return are_finite(first.low / unit * unit, least(last.low, first.high)) &&
               are_finite(most(first.high, first.low), rounded_up(last.high, unit));
    }
};

// body(segment, low, high, tiles, next) for the segments of keys from..to-1 in order, of each of
// which low..high-1 are among these. `next` are the tiles of the segment after it, to be fetched
// ahead; the last one's own.
template <class Source, class Body>
inline void each_segment(const Source& keys, int64_t from, int64_t to, const Body& body) {
    SegmentTiles tiles[2];
    const auto find = [&](int64_t segment) {
        keys.find(segment, most(0, from - segment), least(kSegment, to - segment),
                  tiles[segment / kSegment % 2]);
    };
    const int64_t begin = from / kSegment * kSegment;
    find(begin);
    for (int64_t segment = begin; segment < to; segment += kSegment) {
        const bool is_last = segment + kSegment >= to;
        if (!is_last) find(segment + kSegment);
        body(segment, most(0, from - segment), least(kSegment, to - segment),
             tiles[segment / kSegment % 2], tiles[(segment / kSegment + !is_last) % 2]);
    }
}

}  // namespace quire::QUIRE_LEVEL
