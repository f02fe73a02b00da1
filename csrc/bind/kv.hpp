// The ops on KV memory, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels/kernels.hpp"

namespace quire {

template <class T>
T* at_address(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Fields in the order of RopeStoreArgs.
template <class Context>
void rope_store(Context& c, Type type, int64_t tokens, int64_t heads, uintptr_t qkv,
                int64_t qkv_token, uintptr_t q, const KVMemory& kv, uintptr_t slots,
                uintptr_t positions, uintptr_t cos_sin, int64_t num_positions, int64_t rotary_dim,
                bool is_interleaved, NormOver over, bool is_norm_last, NormKind q_kind, float q_eps,
                uintptr_t q_weight, uintptr_t q_bias, NormKind k_kind, float k_eps,
                uintptr_t k_weight, uintptr_t k_bias, int64_t param_stride, float clip) {
    using Void = const void;
    const RopeStoreArgs args{
        type,
        heads,
        {at_address<void>(qkv), qkv_token, 0},
        at_address<void>(q),
        kv,
        at_address<const int64_t>(slots),
        at_address<const int64_t>(positions),
        at_address<const float>(cos_sin),
        num_positions,
        rotary_dim,
        is_interleaved,
        over,
        is_norm_last,
        {q_kind, q_eps, at_address<Void>(q_weight), at_address<Void>(q_bias), param_stride},
        {k_kind, k_eps, at_address<Void>(k_weight), at_address<Void>(k_bias), param_stride},
        clip};
    c.submit(c.kernels.rope_store, args, tokens);
}

template <class Context>
void attend(Context& c, Type type, int64_t tokens, int64_t heads, uintptr_t q, int64_t q_token,
            int64_t q_head, uintptr_t out, const KVMemory& kv, uintptr_t step, int64_t window,
            double scale, double softcap, uintptr_t sinks, Type sinks_type, uintptr_t alibi,
            Type alibi_type) {
    const AttendArgs args{type,
                          heads,
                          {at_address<void>(q), q_token, q_head},
                          at_address<void>(out),
                          kv,
                          at_address<const AttentionStep>(step),
                          window,
                          scale,
                          softcap,
                          {at_address<const void>(sinks), sinks_type},
                          {at_address<const void>(alibi), alibi_type}};
    const auto& kernels = kv.is_int8 ? c.kernels.attend_bytes : c.kernels.attend;
    c.submit(kernels[static_cast<int>(type)], args, tokens);
}

template <class Context>
void attend_prompts(Context& c, Type type, int64_t tokens, int64_t heads, int64_t kv_heads,
                    int64_t head_dim, uintptr_t q, int64_t q_token, int64_t q_head, uintptr_t k,
                    int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head,
                    uintptr_t out, uintptr_t step, int64_t window, double scale) {
    const AttendPromptsArgs args{type,
                                 heads,
                                 kv_heads,
                                 head_dim,
                                 {at_address<void>(q), q_token, q_head},
                                 {at_address<void>(k), k_token, k_head},
                                 {at_address<void>(v), v_token, v_head},
                                 at_address<void>(out),
                                 at_address<const AttentionStep>(step),
                                 window,
                                 scale};
    c.submit(c.kernels.attend_prompts, args, tokens);
}

template <class Context>
void bind_kv(nanobind::module_& m, nanobind::class_<Context>& context) {
    nanobind::enum_<NormOver>(m, "NormOver")
        .value("none", NormOver::none)
        .value("head", NormOver::head)
        .value("full", NormOver::full);
    nanobind::class_<KVMemory>(m, "KVMemory")
        .def("__init__",
             [](KVMemory* self, uintptr_t data, int64_t num_blocks, int64_t block_size,
                int64_t kv_heads, int64_t head_dim, int64_t tile, int64_t head_bytes,
                int64_t values, int64_t key_scales, int64_t value_scales, bool is_int8) {
                 new (self) KVMemory{at_address<char>(data),
                                     num_blocks,
                                     block_size,
                                     kv_heads,
                                     head_dim,
                                     tile,
                                     head_bytes,
                                     values,
                                     key_scales,
                                     value_scales,
                                     is_int8};
             });
    context.def("rope_store", &rope_store<Context>)
        .def("attend", &attend<Context>)
        .def("attend_prompts", &attend_prompts<Context>);
}

}  // namespace quire
