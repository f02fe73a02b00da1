// Latent attention, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/kv.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// Fields in the order of LatentStoreArgs.
template <class Context>
void latent_store(Context& c, Type type, int64_t tokens, int64_t heads, uintptr_t q,
                  int64_t q_token, int64_t q_head, uintptr_t out, uintptr_t x, int64_t x_token,
                  const LatentMemory& latents, uintptr_t slots, uintptr_t positions,
                  uintptr_t cos_sin, int64_t num_positions, bool is_interleaved, NormKind kind,
                  float eps, uintptr_t weight, uintptr_t bias) {
    const LatentStoreArgs args{
        type,
        heads,
        {at_address<void>(q), q_token, q_head},
        at_address<void>(out),
        {at_address<void>(x), x_token, 0},
        latents,
        at_address<const int64_t>(slots),
        at_address<const int64_t>(positions),
        at_address<const float>(cos_sin),
        num_positions,
        is_interleaved,
        {kind, eps, at_address<const void>(weight), at_address<const void>(bias), 0}};
    c.submit(c.kernels.latent_store, args, tokens);
}

template <class Context>
void latent_attend(Context& c, Type type, int64_t tokens, int64_t heads, uintptr_t q,
                   int64_t q_token, int64_t q_head, uintptr_t q_rotated, int64_t rotated_token,
                   int64_t rotated_head, uintptr_t out, const LatentMemory& latents, uintptr_t step,
                   double scale) {
    const LatentAttendArgs args{type,
                                heads,
                                {at_address<void>(q), q_token, q_head},
                                {at_address<void>(q_rotated), rotated_token, rotated_head},
                                at_address<void>(out),
                                latents,
                                at_address<const AttentionStep>(step),
                                scale};
    c.submit(c.kernels.latent_attend, args, tokens);
}

template <class Context>
void bind_latent(nanobind::module_& m, nanobind::class_<Context>& context) {
    nanobind::class_<LatentMemory>(m, "LatentMemory")
        .def("__init__",
             [](LatentMemory* self, uintptr_t data, int64_t num_blocks, int64_t block_size,
                int64_t block_bytes, int64_t rank, int64_t rotated) {
                 new (self) LatentMemory{
                     at_address<char>(data), num_blocks, block_size, block_bytes, rank, rotated};
             });
    context.def("latent_store", &latent_store<Context>)
        .def("latent_attend", &latent_attend<Context>);
}

}  // namespace quire
