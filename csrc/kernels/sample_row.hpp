// One row of logits and the largest entry of each of its blocks.
//
// Measuring a row is the one read of it that has to come from memory; afterwards it lies in a cache,
// and questions about its large entries touch few blocks. All answers are exact; among equals the
// lower id comes first. Rows have no NaN, except where `has_nan` is asked.
#pragma once

#include "kernels/sample_vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kBlock = 64;
constexpr float kInfinity = __builtin_inff();

inline int64_t num_blocks(int64_t width) { return (width + kBlock - 1) / kBlock; }

struct VocabRow {
    const float* values;
    int64_t width;
    float* maxima;  // of each block of kBlock ids
    float peak;
    bool has_nan;
};

// 16 entries from i on; beyond the row -infinity.
inline F32 entries(const VocabRow& row, int64_t i) {
    const int64_t left = row.width - i;
    if (left >= kLanes) return load(row.values + i);
    if (left <= 0) return splat(-kInfinity);
    return between(load_part(row.values + i, left), 0, left, splat(-kInfinity));
}

// Fill in the maxima of the blocks first..stop-1; true if there is a NaN among them.
inline bool measure_blocks(const VocabRow& row, int64_t first, int64_t stop) {
    uint32_t unordered = 0;
    for (int64_t block = first; block < stop; ++block) {
        const int64_t i = block * kBlock;
        const F32 a = entries(row, i), b = entries(row, i + kLanes);
        const F32 c = entries(row, i + 2 * kLanes), d = entries(row, i + 3 * kLanes);
        unordered |= lanes_unordered(a, b) | lanes_unordered(c, d);
        row.maxima[block] = largest(max(max(a, b), max(c, d)));
    }
    return unordered != 0;
}

// Once all blocks are measured.
inline void find_peak(VocabRow& row) {
    row.peak = -kInfinity;
    for (int64_t block = 0; block < num_blocks(row.width); ++block)
        row.peak = row.maxima[block] > row.peak ? row.maxima[block] : row.peak;
    if (row.has_nan) row.peak = __builtin_nanf("");
}

// body(i, v) for the vectors v of a block, i the id of their first lane.
template <class Body>
inline void each_vector(const VocabRow& row, int64_t block, const Body& body) {
    const int64_t stop = (block + 1) * kBlock < row.width ? (block + 1) * kBlock : row.width;
    for (int64_t i = block * kBlock; i < stop; i += kLanes) body(i, entries(row, i));
}

// body(i, v) for the vectors of all blocks that have an entry >= limit.
template <class Body>
inline void each_vector_with(const VocabRow& row, float limit, const Body& body) {
    for (int64_t block = 0; block < num_blocks(row.width); ++block)
        if (row.maxima[block] >= limit) each_vector(row, block, body);
}

template <class Body>
inline void each_lane(uint32_t lanes, const Body& body) {
    if (lanes == 0xffff) {  // without the search: half the time
        for (int lane = 0; lane < kLanes; ++lane) body(lane);
        return;
    }
    for (; lanes != 0; lanes &= lanes - 1) body(__builtin_ctz(lanes));
}

// Lanes that belong to the row, for a vector that begins at i.
inline uint32_t lanes_of_row(const VocabRow& row, int64_t i) {
    return row.width - i >= kLanes ? 0xffffu : (1u << (row.width - i)) - 1;
}

inline int64_t first_of_peak(const VocabRow& row) {
    int64_t block = 0;
    while (row.maxima[block] != row.peak) ++block;
    int64_t i = block * kBlock;
    while (row.values[i] != row.peak) ++i;
    return i;
}

inline int64_t count_at_least(const VocabRow& row, float limit) {
    int64_t count = 0;
    each_vector_with(row, limit, [&](int64_t i, F32 v) {
        count += __builtin_popcount(lanes_at_least(v, splat(limit)) & lanes_of_row(row, i));
    });
    return count;
}

// An entry as a number that is smaller the larger the entry is, and then the smaller its id.
inline uint64_t sort_key(float value, int64_t id) {
    uint32_t bits;
    value += 0.0f;  // no negative zero
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}
inline int64_t id_of(uint64_t key) { return static_cast<uint32_t>(key); }
inline float value_of(uint64_t key) {
    const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
    const uint32_t bits = ascending >> 31 ? ascending & 0x7fffffffu : ~ascending;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// Room for the keys of a whole row, twice.
struct Keys {
    uint64_t* data;
    uint64_t* spare;
};

// Sort keys whose ids ascend already: four stable passes over the bytes of the value.
inline void sort(const Keys& keys, int64_t count) {
    uint64_t* from = keys.data;
    uint64_t* to = keys.spare;
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t place[257] = {};
        for (int64_t i = 0; i < count; ++i) ++place[(from[i] >> shift & 255) + 1];
        for (int byte = 0; byte < 256; ++byte) place[byte + 1] += place[byte];
        for (int64_t i = 0; i < count; ++i) to[place[from[i] >> shift & 255]++] = from[i];
        uint64_t* swapped = from;
        from = to;
        to = swapped;
    }
}

// The keys of all entries >= limit, by id; how many there are.
inline int64_t collect(const VocabRow& row, float limit, const Keys& keys) {
    int64_t count = 0;
    each_vector_with(row, limit, [&](int64_t i, F32 v) {
        each_lane(lanes_at_least(v, splat(limit)) & lanes_of_row(row, i), [&](int lane) {
            keys.data[count++] = sort_key(row.values[i + lane], i + lane);
        });
    });
    return count;
}

// A number that at least k entries reach, and not many more: the k-th largest of the maxima of
// some 4 k groups of blocks.
inline float reached_by(const VocabRow& row, int64_t k, const Keys& keys) {
    const int64_t blocks = num_blocks(row.width);
    if (k > blocks) return -kInfinity;
    const int64_t size = blocks > 4 * k ? blocks / (4 * k) : 1;
    int64_t count = 0;
    for (int64_t block = 0; block < blocks; ++count) {
        const int64_t stop = block + size < blocks ? block + size : blocks;
        float most = row.maxima[block];
        for (++block; block < stop; ++block) most = row.maxima[block] > most ? row.maxima[block] : most;
        keys.data[count] = sort_key(most, count);
    }
    sort(keys, count);
    return value_of(keys.data[k - 1]);
}

// The keys of at least the k largest entries, sorted; how many there are. 1 <= k <= width.
inline int64_t collect_largest(const VocabRow& row, int64_t k, const Keys& keys) {
    const int64_t count = collect(row, reached_by(row, k, keys), keys);
    sort(keys, count);
    return count;
}

}  // namespace quire::QUIRE_LEVEL
