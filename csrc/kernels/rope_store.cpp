// What happens between the q/k/v projection and attention: clip, norm, rotate, store.
//
// A token at a time, in a copy of its row that stays in the nearest cache. Roundings are those of
// ops/rotary.py.

#include "kernels/kv.hpp"
#include "kernels/norm.hpp"
#include "kernels/quantize.hpp"
#include "kernels/rotate.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// y = x clamped to +-limit.
template <class E>
inline void copy_clipped(const E* x, E* y, int64_t width, float limit) {
    const F32 high = splat(limit), low = splat(-limit);
    each(width,
         [&](auto lanes, int64_t i) { put(lanes, y + i, min(high, max(low, get(lanes, x + i)))); });
}

// first: which of a token's heads is at x.
template <class E>
inline void norm_heads(E* x, int64_t first, int64_t heads, int64_t dim, NormOver over,
                       const NormParams& params) {
    const NormRow<E> normalise = norm_row_of<E>(params.kind);
    if (over == NormOver::full) return normalise(x, x, heads * dim, params, 0);
    for (int64_t h = 0; h < heads; ++h, x += dim) normalise(x, x, dim, params, first + h);
}

template <class E>
inline void store_key(const KVMemory& kv, char* head, int64_t offset, const E* x) {
    E* to = key_of<E>(kv, head, offset);
    const int64_t step = kv.tile * kPack<E>, pairs = kv.head_dim / kPack<E>;
    for (int64_t i = 0; i < pairs; ++i)
        __builtin_memcpy(to + i * step, x + i * kPack<E>, sizeof(E) * kPack<E>);
    if (kv.head_dim % kPack<E> == 0) return;
    to[pairs * step] = x[kv.head_dim - 1];
    to[pairs * step + 1] = E{};  // products with it must stay finite
}

// put(bytes, first, count) for 16 values at a time; the result is their scale.
template <class E, class Put>
inline float quantize_vector(const E* x, int64_t dim, const Put& put_bytes) {
    const Steps steps = byte_steps(range_of(x, dim));
    for (int64_t i = 0; i < dim; i += kLanes) {
        const int64_t count = dim - i < kLanes ? dim - i : kLanes;
        int8_t bytes[kLanes];
        quantize(x + i, count, steps.inverse, -127, 127, bytes);
        put_bytes(bytes, i, count);
    }
    return steps.scale;
}

template <class E>
inline void store_slot(const KVMemory& kv, int64_t slot, int64_t k, const E* key, const E* value) {
    const int64_t offset = slot % kv.block_size, dim = kv.head_dim;
    char* head = head_of(kv, slot / kv.block_size, k);
    if (!kv.is_int8) {
        store_key(kv, head, offset, key);
        __builtin_memcpy(value_of<E>(kv, head, offset), value, dim * sizeof(E));
        return;
    }
    I8* to = key_of<I8>(kv, head, offset);
    key_scales_of(kv, head)[offset] =
        quantize_vector(key, dim, [&](const int8_t* bytes, int64_t first, int64_t count) {
            for (int64_t i = 0; i < count; ++i) to[key_step<I8>(kv, first + i)].value = bytes[i];
        });
    I8* row = value_of<I8>(kv, head, offset);
    value_scales_of(kv, head)[offset] =
        quantize_vector(value, dim, [&](const int8_t* bytes, int64_t first, int64_t count) {
            __builtin_memcpy(row + first, bytes, count);
        });
}

// Neighbouring heads of keys and the queries that go with them.
struct HeadGroup {
    int64_t first, count;
    int64_t first_query, queries;
};

// A token's heads in scratch memory: q, k and v, then cosines and sines.
template <class E>
inline void store_heads(const RopeStoreArgs& a, int64_t token, const HeadGroup& group, E* memory) {
    const int64_t dim = a.kv.head_dim;
    E *q = memory, *k = q + group.queries * dim, *v = k + group.count * dim;
    const auto copy = [&](int64_t head, int64_t count, E* to) {
        copy_clipped(row_of<E>(a.qkv, token, 0) + head * dim, to, count * dim, a.clip);
    };
    copy(group.first_query, group.queries, q);
    copy(a.heads + group.first, group.count, k);
    copy(a.heads + a.kv.kv_heads + group.first, group.count, v);
    const auto norm = [&] {
        norm_heads(q, group.first_query, group.queries, dim, a.norm_over, a.q_norm);
        norm_heads(k, group.first, group.count, dim, a.norm_over, a.k_norm);
    };
    const bool has_norm = a.norm_over != NormOver::none;
    if (has_norm && !a.is_norm_last) norm();
    if (a.cos_sin != nullptr) {
        const Angles<E> angles(a.cos_sin + a.positions[token] * a.rotary_dim, a.rotary_dim,
                               a.is_interleaved, v + group.count * dim);
        for (E* head = q; head < v; head += dim) angles.rotate(head);
    }
    if (has_norm && a.is_norm_last) norm();
    __builtin_memcpy(static_cast<E*>(a.q) + (token * a.heads + group.first_query) * dim, q,
                     group.queries * dim * sizeof(E));
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    for (int64_t h = 0; h < group.count; ++h)
        store_slot(a.kv, slot, group.first + h, k + h * dim, v + h * dim);
}

bool are_in_range(const RopeStoreArgs& a, int64_t tokens) {
    const int64_t num_slots = a.kv.num_blocks * a.kv.block_size;
    for (int64_t i = 0; i < tokens; ++i)
        if (a.slots[i] < -1 || a.slots[i] >= num_slots) return false;
    if (a.cos_sin == nullptr) return true;
    for (int64_t i = 0; i < tokens; ++i)
        if (a.positions[i] < 0 || a.positions[i] >= a.num_positions) return false;
    return true;
}

// Few tokens are cut into groups of heads too: their keys lie in a cache line for every two values,
// none of which has been read for long.
constexpr int64_t kFewTokens = 4, kHeadsOfTile = 2;

bool is_cut(const RopeStoreArgs& a, int64_t tokens) {
    return tokens < kFewTokens && a.norm_over != NormOver::full && a.kv.kv_heads > 0 &&
           a.heads % a.kv.kv_heads == 0;
}

Status rope_store(const RopeStoreArgs& a, int64_t tokens, Pool& pool) {
    if (!are_in_range(a, tokens)) return Status::bad_index;
    const int64_t width = (a.heads + 2 * a.kv.kv_heads) * a.kv.head_dim + a.rotary_dim;
    const bool has_groups = is_cut(a, tokens);
    // Tokens of a prompt share cache lines of a key tile with their neighbours.
    const int64_t per_tile = has_groups ? 1 : tokens <= 64 ? 4 : 16;
    const int64_t heads = has_groups ? kHeadsOfTile : a.kv.kv_heads;
    const int64_t groups = has_groups ? (a.kv.kv_heads + heads - 1) / heads : 1;
    const auto group_of = [&](int64_t index) -> HeadGroup {
        if (!has_groups) return {0, heads, 0, a.heads};
        const int64_t first = index * heads, left = a.kv.kv_heads - first;
        const int64_t count = left < heads ? left : heads, queries = a.heads / a.kv.kv_heads;
        return {first, count, first * queries, count * queries};
    };
    with_type(a.type, [&](auto type) {
        using E = decltype(type);
        const int64_t runs = (tokens + per_tile - 1) / per_tile;
        parallel(pool, runs * groups, [&](int64_t tile, int worker) {
            E* memory = static_cast<E*>(scratch(pool, worker, width * sizeof(E)));
            const int64_t first = tile / groups * per_tile;
            const int64_t stop = first + per_tile < tokens ? first + per_tile : tokens;
            const HeadGroup group = group_of(tile % groups);
            for (int64_t token = first; token < stop; ++token) store_heads(a, token, group, memory);
        });
    });
    return Status::ok;
}

}  // namespace

void fill_rope_store(Kernels& table) { table.rope_store = rope_store; }

}  // namespace quire::QUIRE_LEVEL
