// Low-rank adapters, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/kv.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// factors [tokens, parts * max_rank], or of each segment, and used [tokens], from x, its rows
// x_token apart.
template <class Context>
void lora_shrink(Context& c, const LoraBank& bank, Type type, int64_t tokens, uintptr_t x,
                 int64_t x_token, uintptr_t slots, uintptr_t factors, uintptr_t used,
                 bool is_partial) {
    const LoraShrinkArgs args{bank,
                              type,
                              {reinterpret_cast<void*>(x), x_token, 0},
                              at_address<const int32_t>(slots),
                              at_address<float>(factors),
                              at_address<int32_t>(used),
                              is_partial};
    c.submit(c.kernels.lora_shrink, args, tokens);
}

// values [tokens, width].
template <class Context>
void lora_expand(Context& c, const LoraBank& bank, int64_t tokens, uintptr_t factors,
                 uintptr_t slots, int64_t width, uintptr_t values) {
    const LoraAddend lora{bank, at_address<const float>(factors), at_address<const int32_t>(slots)};
    const LoraExpandArgs args{lora, width, at_address<float>(values)};
    c.submit(c.kernels.lora_expand, args, tokens);
}

// out [tokens, width] from x, its rows x_token apart.
template <class Context>
void lora_embed(Context& c, const LoraBank& bank, Type type, int64_t tokens, int64_t width,
                float scale, uintptr_t x, int64_t x_token, uintptr_t ids, uintptr_t slots,
                uintptr_t out) {
    const LoraEmbedArgs args{bank,
                             type,
                             width,
                             scale,
                             {reinterpret_cast<void*>(x), x_token, 0},
                             at_address<const int64_t>(ids),
                             at_address<const int32_t>(slots),
                             {reinterpret_cast<void*>(out), width, 0}};
    c.submit(c.kernels.lora_embed, args, tokens);
}

template <class Context>
void bind_lora(nanobind::module_& m, nanobind::class_<Context>& context) {
    namespace nb = nanobind;
    nb::class_<LoraBank>(m, "LoraBank")
        .def("__init__", [](LoraBank* self, Type type, int64_t in, int64_t segments, int64_t parts,
                            int64_t max_rank, int64_t blocks, uintptr_t a, uintptr_t b,
                            uintptr_t ranks, uintptr_t pieces, int64_t num_pieces) {
            new (self) LoraBank{type,
                                in,
                                segments,
                                parts,
                                max_rank,
                                blocks,
                                at_address<const void>(a),
                                at_address<const void>(b),
                                at_address<const int32_t>(ranks),
                                at_address<const LoraPiece>(pieces),
                                num_pieces};
        });
    m.attr("lora_block") = kLoraBlock;
    context.def("lora_shrink", &lora_shrink<Context>)
        .def("lora_expand", &lora_expand<Context>)
        .def("lora_embed", &lora_embed<Context>);
}

}  // namespace quire
