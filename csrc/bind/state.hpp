// The ops of layers with a recurrent state, as Python sees them. Rows are an address and the stride
// between tokens; states are `States`' fields; the rest is in the order of the arguments' structs.
#pragma once

#include <nanobind/nanobind.h>

#include <tuple>
#include <utility>

#include "bind/kv.hpp"
#include "kernels/kernels.hpp"

namespace quire {

using StateFields = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, uintptr_t>;
using RowFields = std::pair<uintptr_t, int64_t>;

inline Rows rows_at(const RowFields& fields) {
    return {at_address<void>(fields.first), fields.second, 0};
}

inline States states_at(const StateFields& fields) {
    const auto [data, block_bytes, num_blocks, reads, writes] = fields;
    return {at_address<char>(data), block_bytes, num_blocks, at_address<const int64_t>(reads),
            at_address<const int64_t>(writes)};
}

template <class Context>
void short_conv(Context& c, Type type, int64_t tokens, int64_t width, int64_t kernel, bool is_silu,
                RowFields x, RowFields before, RowFields after, RowFields out, uintptr_t weight,
                uintptr_t bias, StateFields states) {
    const ShortConvArgs args{type,
                             width,
                             kernel,
                             is_silu ? Act::silu : Act::none,
                             rows_at(x),
                             rows_at(before),
                             rows_at(after),
                             rows_at(out),
                             at_address<const void>(weight),
                             at_address<const void>(bias),
                             states_at(states)};
    c.submit(c.kernels.short_conv, args, tokens);
}

template <class Context>
void mamba_scan(Context& c, Type type, int64_t tokens, int64_t width, int64_t size, RowFields x,
                RowFields dt, RowFields b, RowFields c_rows, RowFields gate, RowFields out,
                uintptr_t decay, uintptr_t skip, StateFields states) {
    const MambaScanArgs args{type,
                             width,
                             size,
                             rows_at(x),
                             rows_at(dt),
                             rows_at(b),
                             rows_at(c_rows),
                             rows_at(gate),
                             rows_at(out),
                             at_address<const float>(decay),
                             at_address<const float>(skip),
                             states_at(states)};
    c.submit(c.kernels.mamba_scan, args, tokens);
}

template <class Context>
void mamba2_scan(Context& c, Type type, int64_t tokens, int64_t heads, int64_t dim, int64_t size,
                 int64_t groups, RowFields x, RowFields dt, RowFields b, RowFields c_rows,
                 RowFields out, uintptr_t decay, uintptr_t skip, uintptr_t dt_bias,
                 float least_step, float largest_step, StateFields states) {
    const Mamba2ScanArgs args{type,
                              heads,
                              dim,
                              size,
                              groups,
                              rows_at(x),
                              rows_at(dt),
                              rows_at(b),
                              rows_at(c_rows),
                              rows_at(out),
                              at_address<const float>(decay),
                              at_address<const float>(skip),
                              at_address<const float>(dt_bias),
                              least_step,
                              largest_step,
                              states_at(states)};
    c.submit(c.kernels.mamba2_scan, args, tokens);
}

template <class Context>
void gated_delta(Context& c, Type type, int64_t tokens, int64_t heads, int64_t key_heads,
                 int64_t dim, int64_t size, RowFields q, RowFields k, RowFields v, RowFields a,
                 RowFields b, RowFields out, float eps, uintptr_t decay, uintptr_t dt_bias,
                 StateFields states) {
    const GatedDeltaArgs args{type,
                              heads,
                              key_heads,
                              dim,
                              size,
                              rows_at(q),
                              rows_at(k),
                              rows_at(v),
                              rows_at(a),
                              rows_at(b),
                              rows_at(out),
                              eps,
                              at_address<const float>(decay),
                              at_address<const float>(dt_bias),
                              states_at(states)};
    c.submit(c.kernels.gated_delta, args, tokens);
}

template <class Context>
void gated_norm(Context& c, Type type, int64_t tokens, int64_t width, int64_t group,
                bool gate_first, RowFields y, RowFields gate, RowFields out, uintptr_t weight,
                bool is_weight_shared, float eps) {
    const GatedNormArgs args{type,
                             width,
                             group,
                             gate_first,
                             rows_at(y),
                             rows_at(gate),
                             rows_at(out),
                             at_address<const void>(weight),
                             is_weight_shared,
                             eps};
    c.submit(c.kernels.gated_norm, args, tokens);
}

template <class Context>
void bind_state(nanobind::class_<Context>& context) {
    context.def("short_conv", &short_conv<Context>)
        .def("mamba_scan", &mamba_scan<Context>)
        .def("mamba2_scan", &mamba2_scan<Context>)
        .def("gated_delta", &gated_delta<Context>)
        .def("gated_norm", &gated_norm<Context>);
}

}  // namespace quire
