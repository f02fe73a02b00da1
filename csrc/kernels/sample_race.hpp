// The draw: a race in which the token with the largest e^(x - peak) / waiting time wins.
//
// The noise bits are computed for every token, the score only for those that a cheap upper bound
// cannot rule out, some dozens a row. So a draw costs little more than reading the row, and its
// result is the same at every level.
#pragma once

#include "kernels/sample_filter.hpp"

namespace quire::QUIRE_LEVEL {

// What one row's race is about; peak is that of the divided row.
struct Race {
    const VocabRow& row;
    const int32_t* hashes;
    uint32_t a, b;
    float temperature;
    float peak;
    Kept kept;
};

struct Winner {
    double score;
    int64_t id;
};

// The peak's own score is at least 1 / 16.7, so nobody wins with less.
constexpr double kLeastScore = 0.05;
constexpr Winner kNobody = {kLeastScore, -1};

// Beyond, rounding of the divided logits is too coarse for the bound, and every token is looked at.
constexpr float kTamePeak = 1e6f;

// v of ops/sampling/noise.py, as there in fp32.
inline float uniform(float bits) {
    const float v = (bits + 0.5f) * 0x1p-31f;
    return v < 1 - 0x1p-24f ? v : 1 - 0x1p-24f;
}

inline double score_of(const Race& race, int64_t id, float bits) {
    const float x = race.row.values[id] / race.temperature;
    return __builtin_exp(static_cast<double>(x - race.peak)) /
           -__builtin_log1p(-static_cast<double>(uniform(bits)));
}

// An upper bound of e^(x - peak), from the logits: 2^n (1 + f) >= 2^(n + f). The slope turns a logit
// into units of a float's bits; the slack outweighs all rounding.
struct Bound {
    F32 slope, offset;

    explicit Bound(const Race& race) {
        constexpr double kUnit = 12102203.161561485;  // 2^23 / ln 2
        const double size = race.peak < 0 ? -race.peak : race.peak;
        const double slack = 1e-3 + 1e-6 * size;
        slope = splat(static_cast<float>(kUnit / static_cast<double>(race.temperature)));
        offset = splat(static_cast<float>(127.0 * (1 << 23) +
                                          kUnit * (slack - static_cast<double>(race.peak))));
    }
    F32 operator()(F32 v) const { return from_bits(fma(v, slope, offset)); }
};

// The waiting time is at least v, so only e^(x - peak) > score * v can win; 0 lets everybody pass.
inline F32 limit_of(const Race& race, const Winner& best) {
    const bool is_tame = race.peak < kTamePeak && race.peak > -kTamePeak;
    return splat(is_tame ? static_cast<float>(best.score * (1 - 1e-6) * 0x1p-31) : 0.0f);
}

// Let the tokens of the blocks first..stop-1 race.
inline Winner race_blocks(const Race& race, int64_t first, int64_t stop) {
    const VocabRow& row = race.row;
    const Bound bound(race);
    Winner best = kNobody;
    F32 limit = limit_of(race, best);
    const auto meet = [&](int64_t id, float bits) {
        if (!is_kept(race.kept, row.values[id] / race.temperature, id)) return;
        const double score = score_of(race, id, bits);
        if (score > best.score) best = {score, id};
        limit = limit_of(race, best);
    };
    for (int64_t block = first; block < stop; ++block) {
        if (row.maxima[block] / race.temperature < race.kept.least) continue;
        each_vector(row, block, [&](int64_t i, F32 v) {
            const auto* hashes = reinterpret_cast<const float*>(race.hashes) + i;
            const int64_t left = row.width - i;
            const F32 words = left >= kLanes ? load(hashes) : load_part(hashes, left);
            const F32 bits = noise_bits(words, race.a, race.b);
            const uint32_t lanes = lanes_at_least(bound(v), fma(bits, limit, limit));
            if (lanes == 0) return;
            float bits_of_lane[kLanes];
            store(bits_of_lane, bits);
            each_lane(lanes & lanes_of_row(row, i),
                      [&](int lane) { meet(i + lane, bits_of_lane[lane]); });
        });
    }
    return best;
}

}  // namespace quire::QUIRE_LEVEL
