// The masks of grammars, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/kv.hpp"
#include "kernels/mask.hpp"

namespace quire {

template <class Context>
void mask(Context& c, int64_t count, uintptr_t logits, int64_t stride, int64_t width,
          int64_t num_rows, uintptr_t rows, uintptr_t words, int64_t words_stride) {
    const MaskArgs args{at_address<float>(logits),        stride, width,
                        num_rows,                         at_address<const int64_t>(rows),
                        at_address<const int32_t>(words), words_stride};
    c.submit(&mask_logits, args, count);
}

template <class Context>
void bind_mask(nanobind::class_<Context>& context) {
    context.def("mask", &mask<Context>);
}

}  // namespace quire
