// The choice of experts; ops/routing.py is the definition. Of equal scores the first is chosen.
//
// Rows do not see each other, and the order of a row's additions depends on the arguments alone.

#include "core/parallel.hpp"
#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/tiles.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

constexpr int32_t kTaken = INT32_MIN;  // below all numbers
constexpr float kNothing = -__builtin_inff();

// Whole numbers in the order of the floats; NaN is the largest, as torch has it.
int32_t key_of(float v) {
    if (v != v) return INT32_MAX;
    int32_t bits;
    __builtin_memcpy(&bits, &v, sizeof bits);
    return bits ^ (bits >> 31 & INT32_MAX);
}

// The place of the largest key, which is taken.
int64_t take_best(int32_t* keys, int64_t count) {
    int32_t best = keys[0];
    for (int64_t i = 1; i < count; ++i) best = keys[i] > best ? keys[i] : best;
    int64_t place = 0;
    while (keys[place] != best) ++place;
    keys[place] = kTaken;
    return place;
}

float largest(const float* values, int64_t count) {
    F32 best = splat(kNothing);
    each(count, [&](auto lanes, int64_t i) {
        const F32 here = get(lanes, values + i);
        if constexpr (__is_same(decltype(lanes), Whole)) {
            best = max(best, here);
        } else {
            float last[kLanes];
            store(last, here);
            for (int64_t j = lanes.n; j < kLanes; ++j) last[j] = kNothing;
            best = max(best, load(last));
        }
    });
    float lanes[kLanes], found = kNothing;
    store(lanes, best);
    for (float lane : lanes) found = lane > found ? lane : found;
    return found;
}

void softmax(const float* from, int64_t count, float* to) {
    const F32 peak = splat(largest(from, count));
    const float sum = total(count, [&](auto lanes, int64_t i) {
        const F32 value = exp(sub(get(lanes, from + i), peak));
        put(lanes, to + i, value);
        return value;
    });
    each(count,
         [&](auto lanes, int64_t i) { put(lanes, to + i, div(get(lanes, to + i), splat(sum))); });
}

void sigmoids(const float* from, int64_t count, float* to) {
    each(count, [&](auto lanes, int64_t i) { put(lanes, to + i, sigmoid(get(lanes, from + i))); });
}

// What a row needs, in a tile's scratch memory.
struct RowMemory {
    float* logits;
    float* scores;
    float* group_scores;
    int32_t* keys;
    int32_t* group_keys;

    RowMemory(const RouteArgs& a, void* memory)
        : logits(static_cast<float*>(memory)),
          scores(logits + a.experts),
          group_scores(scores + a.experts),
          keys(reinterpret_cast<int32_t*>(group_scores + a.groups)),
          group_keys(keys + a.experts) {}

    static size_t num_bytes(const RouteArgs& a) {
        return (3 * a.experts + 2 * a.groups) * sizeof(float);
    }
};

// Leave the keys of the groups whose best scores have the largest sums.
void keep_best_groups(const RouteArgs& a, const float* eligible, const RowMemory& row) {
    const int64_t size = a.experts / a.groups;
    const int64_t best = a.group_best < size ? a.group_best : size;
    for (int64_t g = 0; g < a.groups; ++g) {
        float sum = 0;
        int32_t* keys = row.keys + g * size;
        for (int64_t j = 0; j < best; ++j) sum += eligible[g * size + take_best(keys, size)];
        row.group_keys[g] = key_of(sum);
    }
    for (int64_t i = 0; i < a.experts; ++i) row.keys[i] = key_of(kNothing);
    for (int64_t j = 0; j < a.top_groups; ++j) {
        const int64_t first = take_best(row.group_keys, a.groups) * size;
        for (int64_t i = first; i < first + size; ++i) row.keys[i] = key_of(eligible[i]);
    }
}

// The experts with the best scores, and their weights before a.scale.
void choose_best(const RouteArgs& a, const RowMemory& row, int32_t* chosen, float* weights) {
    const float* scores = row.logits;
    if (a.score == RouterScore::softmax) softmax(row.logits, a.experts, row.scores);
    if (a.score == RouterScore::sigmoid) sigmoids(row.logits, a.experts, row.scores);
    if (a.score == RouterScore::softmax || a.score == RouterScore::sigmoid) scores = row.scores;
    // what is eligible takes the place of the logits, which nothing reads again but as scores
    float* eligible = row.logits;
    if (scores == row.logits && a.select_bias != nullptr) {
        __builtin_memcpy(row.scores, row.logits, a.experts * sizeof(float));
        scores = row.scores;
    }
    for (int64_t i = 0; i < a.experts; ++i) {
        eligible[i] = a.select_bias == nullptr ? scores[i] : scores[i] + a.select_bias[i];
        row.keys[i] = key_of(eligible[i]);
    }
    if (a.groups > 1) keep_best_groups(a, eligible, row);
    for (int64_t j = 0; j < a.top_k; ++j) {
        chosen[j] = static_cast<int32_t>(take_best(row.keys, a.experts));
        weights[j] = scores[chosen[j]];
    }
    if (a.score == RouterScore::softmax_topk) return softmax(weights, a.top_k, weights);
    if (a.score == RouterScore::sigmoid_topk) return sigmoids(weights, a.top_k, weights);
    if (!a.renorm) return;
    float sum = 0;
    for (int64_t j = 0; j < a.top_k; ++j) sum += weights[j];
    sum += a.renorm_eps;
    if (sum < a.renorm_min) sum = a.renorm_min;
    for (int64_t j = 0; j < a.top_k; ++j) weights[j] /= sum;
}

// One after the other, weighed by a softmax over those that are left and near the best one.
void choose_sparsely(const RouteArgs& a, const RowMemory& row, int32_t* chosen, float* weights) {
    const float* logits = row.logits;
    for (int64_t i = 0; i < a.experts; ++i) row.keys[i] = key_of(logits[i]);
    for (int64_t j = 0; j < a.top_k; ++j) {
        const int64_t best = take_best(row.keys, a.experts);
        const float peak = logits[best];
        for (int64_t i = 0; i < a.experts; ++i) {
            const float magnitude = __builtin_fabsf(logits[i]);
            const float size = magnitude > peak ? magnitude : peak;
            const bool is_far = (peak - logits[i]) / size > 2 * a.jitter;
            const bool is_left = row.keys[i] != kTaken || i == best;
            row.scores[i] = is_left && !is_far ? logits[i] : kNothing;
        }
        softmax(row.scores, a.experts, row.scores);
        chosen[j] = static_cast<int32_t>(best);
        weights[j] = row.scores[best];
    }
}

void route_row(const RouteArgs& a, int64_t token, void* memory) {
    const RowMemory row(a, memory);
    with_type(a.type, [&](auto type) {
        const auto* from = row_of<decltype(type)>(a.logits, token, 0);
        each(a.experts,
             [&](auto lanes, int64_t i) { put(lanes, row.logits + i, get(lanes, from + i)); });
    });
    int32_t* chosen = a.chosen + token * a.top_k;
    float* weights = a.weights + token * a.top_k;
    if (a.score == RouterScore::sparsemixer)
        choose_sparsely(a, row, chosen, weights);
    else
        choose_best(a, row, chosen, weights);
    for (int64_t j = 0; j < a.top_k; ++j) {
        weights[j] *= a.scale;
        if (a.expert_scales != nullptr) weights[j] *= a.expert_scales[chosen[j]];
    }
}

Status route(const RouteArgs& a, int64_t tokens, Pool& pool) {
    const int64_t work = a.experts * (a.top_k + 4);
    const int64_t per_tile = work < kElementsPerTile ? kElementsPerTile / work : 1;
    parallel(pool, (tokens + per_tile - 1) / per_tile, [&](int64_t tile, int worker) {
        void* memory = scratch(pool, worker, RowMemory::num_bytes(a));
        const int64_t end = (tile + 1) * per_tile, stop = end < tokens ? end : tokens;
        for (int64_t t = tile * per_tile; t < stop; ++t) route_row(a, t, memory);
    });
    return Status::ok;
}

}  // namespace

void fill_route(Kernels& table) { table.route = route; }

}  // namespace quire::QUIRE_LEVEL
