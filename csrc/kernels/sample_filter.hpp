// min-p, top-k and top-p of one row: what survives is described by one entry.
#pragma once

#include "kernels/sample_row.hpp"

namespace quire::QUIRE_LEVEL {

// As a row of the op's settings: temperature > 0; top_k, top_p and min_p as in SamplingParams.
struct Settings {
    double temperature, top_k, top_p, min_p;
};

// What stays of the divided logits: those above `least`, and of those equal to it the ids up to
// `last_id`.
struct Kept {
    float least;
    int64_t last_id;
};

inline bool is_kept(const Kept& kept, float x, int64_t id) {
    return x > kept.least || (x == kept.least && id <= kept.last_id);
}

// Mass by distance from the peak: 16 bins per unit, the last for everything farther away. Four
// copies, since adding to the same bin twice in a row waits for memory.
constexpr int kBins = 512, kBinCopies = 4, kNearBins = 128;
constexpr float kBinsPerUnit = 16.0f;

struct Room {
    Keys keys;
    double* bins;  // kBinCopies * kBins
};

inline int64_t room_bytes(int64_t width) {
    return width * 2 * static_cast<int64_t>(sizeof(uint64_t)) +
           kBinCopies * kBins * static_cast<int64_t>(sizeof(double));
}
inline Room room_at(void* memory, int64_t width) {
    double* bins = static_cast<double*>(memory);
    uint64_t* keys = reinterpret_cast<uint64_t*>(bins + kBinCopies * kBins);
    return {{keys, keys + width}, bins};
}

// A row divided by its temperature, and what still stays of it.
struct Divided {
    const VocabRow& row;
    float temperature;
    float peak;
    float least;
};

// body(i, x) for the divided vectors of all blocks that have an entry >= least.
template <class Body>
inline void each_divided(const Divided& d, const Body& body) {
    for (int64_t block = 0; block < num_blocks(d.row.width); ++block)
        if (d.row.maxima[block] / d.temperature >= d.least)
            each_vector(d.row, block,
                        [&](int64_t i, F32 v) { body(i, div(v, splat(d.temperature))); });
}
inline F32 bin_of(const Divided& d, F32 x) {
    return min(splat(kBins - 1), mul(sub(splat(d.peak), x), splat(kBinsPerUnit)));
}
inline F32 weights(const Divided& d, F32 x) {
    return keep_at_least(x, splat(d.least), exp(sub(x, splat(d.peak))));
}

// Sum up by bin what lies in the first `near` bins, and the rest at once, which is the result.
inline double weigh(const Divided& d, int near, double* bins) {
    for (int i = 0; i < kBinCopies * kBins; ++i) bins[i] = 0;
    const F32 border = splat(static_cast<float>(near));
    F64 far = zero64();
    each_divided(d, [&](int64_t, F32 x) {
        const F32 place = bin_of(d, x), weight = weights(d, x);
        accumulate(far, keep_at_least(place, border, weight));
        const uint32_t lanes = lanes_above(border, place);
        if (lanes == 0) return;
        int32_t bin[kLanes];
        float weight_of[kLanes];
        store_whole(bin, place);
        store(weight_of, weight);
        each_lane(lanes, [&](int lane) {
            bins[lane % kBinCopies * kBins + bin[lane]] += static_cast<double>(weight_of[lane]);
        });
    });
    for (int i = 0; i < kBins; ++i)
        for (int copy = 1; copy < kBinCopies; ++copy) bins[i] += bins[copy * kBins + i];
    return total(far);
}

// The keys of the entries in one bin, sorted by their divided values; how many there are.
inline int64_t collect_bin(const Divided& d, int bin, const Keys& keys) {
    const F32 low = splat(static_cast<float>(bin)), high = splat(static_cast<float>(bin + 1));
    int64_t count = 0;
    each_divided(d, [&](int64_t i, F32 x) {
        const F32 place = bin_of(d, x);
        const uint32_t in_bin = lanes_at_least(place, low) & ~lanes_at_least(place, high);
        if (in_bin == 0) return;
        float lanes[kLanes];
        store(lanes, x);
        const uint32_t staying = lanes_at_least(x, splat(d.least)) & lanes_of_row(d.row, i);
        each_lane(in_bin & staying,
                  [&](int lane) { keys.data[count++] = sort_key(lanes[lane], i + lane); });
    });
    sort(keys, count);
    return count;
}

// The entry at which the mass reaches `wanted`, sought in one bin that has `before` before it.
inline Kept cut_within(const Divided& d, int bin, double before, double wanted, const Keys& keys) {
    const int64_t count = collect_bin(d, bin, keys);
    int64_t last = 0;
    for (double mass = before; last + 1 < count; ++last) {
        mass += static_cast<double>(first(exp(splat(value_of(keys.data[last]) - d.peak))));
        if (mass >= wanted) break;
    }
    return {value_of(keys.data[last]), id_of(keys.data[last])};
}

// top-p of what is >= least, if the entries at which it cuts lie in the first `near` bins.
inline bool nucleus_within(const Divided& d, double top_p, int near, const Room& room, Kept& kept) {
    double sum = weigh(d, near, room.bins);
    for (int i = 0; i < kBins; ++i) sum += room.bins[i];
    const double wanted = top_p * sum;
    double before = 0;
    int bin = 0;
    for (; bin < kBins - 1 && before + room.bins[bin] < wanted; ++bin) before += room.bins[bin];
    if (bin >= near) return false;
    kept = cut_within(d, bin, before, wanted, room.keys);
    return true;
}

inline Kept nucleus(const Divided& d, double top_p, const Room& room) {
    Kept kept;
    // what is near the peak nearly always suffices
    if (!nucleus_within(d, top_p, kNearBins, room, kept)) nucleus_within(d, top_p, kBins, room, kept);
    return kept;
}

// What min-p, then top-k, then top-p leave of a row with a finite peak.
inline Kept survivors(const VocabRow& row, const Settings& s, const Room& room) {
    const float temperature = static_cast<float>(s.temperature), peak = row.peak / temperature;
    float least = -kInfinity;
    if (s.min_p > 0) least = static_cast<float>(static_cast<double>(peak) + __builtin_log(s.min_p));
    if (s.top_k > 0 && s.top_k < static_cast<double>(row.width)) {
        const int64_t k = static_cast<int64_t>(s.top_k);
        collect_largest(row, k, room.keys);
        const float kth = value_of(room.keys.data[k - 1]) / temperature;
        least = kth > least ? kth : least;
    }
    if (s.top_p >= 1) return {least, row.width};
    return nucleus({row, temperature, peak, least}, s.top_p, room);
}

}  // namespace quire::QUIRE_LEVEL
