// The ops on logits, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/kv.hpp"
#include "kernels/kernels.hpp"

namespace quire {

inline LogitsRows logits_at(uintptr_t data, int64_t stride, int64_t width) {
    return {at_address<const float>(data), stride, width};
}

template <class Context>
void greedy(Context& c, int64_t rows, uintptr_t logits, int64_t stride, int64_t width,
            uintptr_t ids, uintptr_t values) {
    const GreedyArgs args{logits_at(logits, stride, width), at_address<int64_t>(ids),
                          at_address<float>(values)};
    c.submit(c.kernels.greedy, args, rows);
}

template <class Context>
void draw(Context& c, int64_t rows, uintptr_t logits, int64_t stride, int64_t width,
          uintptr_t settings, uintptr_t keys, uintptr_t hashes, uintptr_t ids, uintptr_t peaks) {
    const DrawArgs args{logits_at(logits, stride, width),  at_address<const double>(settings),
                        at_address<const int32_t>(keys),   at_address<const int32_t>(hashes),
                        at_address<int64_t>(ids),          at_address<float>(peaks)};
    c.submit(c.kernels.draw, args, rows);
}

template <class Context>
void truncate(Context& c, int64_t rows, uintptr_t logits, int64_t stride, int64_t width,
              uintptr_t settings, uintptr_t out) {
    const TruncateArgs args{logits_at(logits, stride, width), at_address<const double>(settings),
                            at_address<float>(out)};
    c.submit(c.kernels.truncate, args, rows);
}

template <class Context>
void rank(Context& c, int64_t rows, uintptr_t logits, int64_t stride, int64_t width,
          uintptr_t token_ids, int64_t num_top, uintptr_t top_ids, uintptr_t top_values,
          uintptr_t ranks, uintptr_t peaks, uintptr_t log_sums) {
    const RankArgs args{logits_at(logits, stride, width),
                        at_address<const int64_t>(token_ids),
                        num_top,
                        at_address<int32_t>(top_ids),
                        at_address<float>(top_values),
                        at_address<int32_t>(ranks),
                        at_address<float>(peaks),
                        at_address<float>(log_sums)};
    c.submit(c.kernels.rank, args, rows);
}

template <class Context>
void bind_sample(nanobind::class_<Context>& context) {
    context.def("greedy", &greedy<Context>)
        .def("draw", &draw<Context>)
        .def("truncate", &truncate<Context>)
        .def("rank", &rank<Context>);
}

}  // namespace quire
