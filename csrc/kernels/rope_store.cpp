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

template <class E>
inline void norm_heads(E* x, int64_t heads, int64_t dim, NormOver over, const NormParams& params) {
    const NormRow<E> normalise = norm_row_of<E>(params.kind);
    if (over == NormOver::full) return normalise(x, x, heads * dim, params, 0);
    for (int64_t h = 0; h < heads; ++h) normalise(x + h * dim, x + h * dim, dim, params, h);
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
            for (int64_t i = 0; i < count; ++i) to[(first + i) * kv.tile].value = bytes[i];
        });
    I8* row = value_of<I8>(kv, head, offset);
    value_scales_of(kv, head)[offset] =
        quantize_vector(value, dim, [&](const int8_t* bytes, int64_t first, int64_t count) {
            __builtin_memcpy(row + first, bytes, count);
        });
}

// A token's row in scratch memory: q, k and v, then cosines and sines.
template <class E>
inline void store_token(const RopeStoreArgs& a, int64_t token, E* row) {
    const int64_t dim = a.kv.head_dim, kv_heads = a.kv.kv_heads;
    E *q = row, *k = q + a.heads * dim, *v = k + kv_heads * dim;
    copy_clipped(row_of<E>(a.qkv, token, 0), row, (a.heads + 2 * kv_heads) * dim, a.clip);
    const auto norm = [&] {
        norm_heads(q, a.heads, dim, a.norm_over, a.q_norm);
        norm_heads(k, kv_heads, dim, a.norm_over, a.k_norm);
    };
    const bool has_norm = a.norm_over != NormOver::none;
    if (has_norm && !a.is_norm_last) norm();
    if (a.cos_sin != nullptr) {
        const Angles<E> angles(a.cos_sin + a.positions[token] * a.rotary_dim, a.rotary_dim,
                               a.is_interleaved, v + kv_heads * dim);
        for (E* head = q; head < v; head += dim) angles.rotate(head);
    }
    if (has_norm && a.is_norm_last) norm();
    __builtin_memcpy(static_cast<E*>(a.q) + token * a.heads * dim, q, a.heads * dim * sizeof(E));
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    for (int64_t h = 0; h < kv_heads; ++h) store_slot(a.kv, slot, h, k + h * dim, v + h * dim);
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

Status rope_store(const RopeStoreArgs& a, int64_t tokens, Pool& pool) {
    if (!are_in_range(a, tokens)) return Status::bad_index;
    const int64_t width = (a.heads + 2 * a.kv.kv_heads) * a.kv.head_dim + a.rotary_dim;
    // Tokens of a prompt share cache lines of a key tile with their neighbours.
    const int64_t per_tile = tokens <= 64 ? 4 : 16;
    with_type(a.type, [&](auto type) {
        using E = decltype(type);
        parallel(pool, (tokens + per_tile - 1) / per_tile, [&](int64_t tile, int worker) {
            E* row = static_cast<E*>(scratch(pool, worker, width * sizeof(E)));
            const int64_t first = tile * per_tile;
            const int64_t stop = first + per_tile < tokens ? first + per_tile : tokens;
            for (int64_t token = first; token < stop; ++token) store_token(a, token, row);
        });
    });
    return Status::ok;
}

}  // namespace

void fill_rope_store(Kernels& table) { table.rope_store = rope_store; }

}  // namespace quire::QUIRE_LEVEL
