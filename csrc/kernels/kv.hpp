// Where keys and values lie in a layer's KV memory.
#pragma once

#include "kernels/attention_vec.hpp"
#include "kernels/element.hpp"

namespace quire::QUIRE_LEVEL {

// The part of KV head `head` of a block.
inline char* head_of(const KVMemory& kv, int64_t block, int64_t head) {
    return kv.data + (block * kv.kv_heads + head) * kv.head_bytes;
}

// Element 0 of the key in slot `offset` of a block; the next d is at key_step.
template <class S>
inline S* key_of(const KVMemory& kv, char* head, int64_t offset) {
    const int64_t packed = (kv.head_dim + kPack<S> - 1) / kPack<S>;
    const int64_t tile = offset / kv.tile, place = offset % kv.tile;
    return reinterpret_cast<S*>(head) + (tile * packed * kv.tile + place) * kPack<S>;
}
template <class S>
inline int64_t key_step(const KVMemory& kv, int64_t d) {
    return d / kPack<S> * kv.tile * kPack<S> + d % kPack<S>;
}

template <class S>
inline S* value_of(const KVMemory& kv, char* head, int64_t offset) {
    return reinterpret_cast<S*>(head + kv.values) + offset * kv.head_dim;
}

inline float* key_scales_of(const KVMemory& kv, char* head) {
    return reinterpret_cast<float*>(head + kv.key_scales);
}
inline float* value_scales_of(const KVMemory& kv, char* head) {
    return reinterpret_cast<float*>(head + kv.value_scales);
}

// Call `body` with a value of the type that keys and values are stored in: bytes, or `type`.
template <class Body>
inline void with_stored(Type type, const KVMemory& kv, const Body& body) {
    if (kv.is_int8) return body(I8{});
    with_type(type, body);
}

}  // namespace quire::QUIRE_LEVEL
