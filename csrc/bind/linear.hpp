// Matrix products, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>
#include <vector>

#include "kernels/tables.hpp"

namespace quire {

// y [tokens, width of the finish], or for partial sums [tokens, out], from x, its rows
// x_token apart; values: those of the addend, [*, out], or 0; peaks: or 0; bank: with factors and
// slots of adapters, or None.
template <class Context>
void linear(Context& c, const PackedWeight& weight, int64_t tokens, uintptr_t x, int64_t x_token,
            uintptr_t y, int64_t y_token, FinishKind kind, Act act, float scale, float softcap,
            uintptr_t values, uintptr_t rows, uintptr_t peaks, const LoraBank* bank,
            uintptr_t factors, uintptr_t slots) {
    LinearArgs args{
        weight,
        {reinterpret_cast<void*>(x), x_token, 0},
        {reinterpret_cast<void*>(y), y_token, weight.out},
        {kind, act, scale, softcap},
        {reinterpret_cast<const float*>(values), weight.out, reinterpret_cast<int32_t*>(rows)},
        reinterpret_cast<const float*>(peaks)};
    args.weight.is_streamed = c.streams_weights;
    if (bank != nullptr)
        args.lora = {*bank, reinterpret_cast<const float*>(factors),
                     reinterpret_cast<const int32_t*>(slots)};
    c.submit(product_with(weight, c.kernels).linear, args, tokens);
}

// y [tokens, width] from parts [tokens, count, width]; scales, peaks, bias, values: or 0.
template <class Context>
void linear_total(Context& c, Type type, int64_t tokens, int64_t width, int64_t count,
                  bool are_whole, uintptr_t parts, uintptr_t scales, uintptr_t peaks,
                  uintptr_t bias, uintptr_t values, uintptr_t rows, uintptr_t y) {
    const LinearTotalArgs args{type,
                               width,
                               count,
                               are_whole,
                               reinterpret_cast<const void*>(parts),
                               reinterpret_cast<const float*>(scales),
                               reinterpret_cast<const float*>(peaks),
                               reinterpret_cast<const float*>(bias),
                               {reinterpret_cast<const float*>(values), width,
                                reinterpret_cast<const int32_t*>(rows)},
                               reinterpret_cast<void*>(y)};
    c.submit(c.kernels.linear_total, args, tokens);
}

// y [tokens, heads, out] from x, its tokens x_token apart and their heads x_head; the panels of
// heads are weight_bytes apart, and `weight` is the first one's.
template <class Context>
void heads_linear(Context& c, const PackedWeight& weight, int64_t heads, int64_t weight_bytes,
                  int64_t tokens, uintptr_t x, int64_t x_token, int64_t x_head, uintptr_t y) {
    const LinearArgs first{weight,
                           {reinterpret_cast<void*>(x), x_token, x_head},
                           {reinterpret_cast<void*>(y), heads * weight.out, weight.out},
                           {FinishKind::plain, Act::none, 1, 0}};
    const HeadsArgs args{first, heads, weight_bytes};
    c.submit(c.kernels.heads_linear[static_cast<int>(weight.type)], args, tokens);
}

// chosen and weights [tokens, top_k] from logits [tokens, experts], their rows `row` apart; bias
// and scales: or 0.
template <class Context>
void route(Context& c, Type type, int64_t tokens, int64_t experts, uintptr_t logits, int64_t row,
           int64_t top_k, RouterScore score, bool renorm, int64_t groups, int64_t top_groups,
           int64_t group_best, float scale, float renorm_eps, float renorm_min, float jitter,
           uintptr_t bias, uintptr_t scales, uintptr_t chosen, uintptr_t weights) {
    const RouteArgs args{type,
                         experts,
                         top_k,
                         score,
                         renorm,
                         groups,
                         top_groups,
                         group_best,
                         scale,
                         renorm_eps,
                         renorm_min,
                         jitter,
                         {reinterpret_cast<void*>(logits), row, 0},
                         reinterpret_cast<const float*>(bias),
                         reinterpret_cast<const float*>(scales),
                         reinterpret_cast<int32_t*>(chosen),
                         reinterpret_cast<float*>(weights)};
    c.submit(c.kernels.route, args, tokens);
}

// y [tokens, out of down] from x, its rows x_token apart; up and down: `experts` weights each, as
// PackedWeight.store() leaves them. chosen and weights [tokens, top_k]; slots: of the tokens'
// adapters, or 0, whose banks may be None.
template <class Context>
void experts(Context& c, int64_t num_experts, uintptr_t up, uintptr_t down, int64_t tokens,
             uintptr_t x, int64_t x_token, uintptr_t y, int64_t top_k, uintptr_t chosen,
             uintptr_t weights, FinishKind kind, Act act, float scale, bool weighs_input,
             uintptr_t slots, const LoraBank* up_bank, const LoraBank* down_bank) {
    const auto* ups = reinterpret_cast<const PackedWeight*>(up);
    const auto* downs = reinterpret_cast<const PackedWeight*>(down);
    const ExpertsArgs args{num_experts,
                           top_k,
                           ups,
                           downs,
                           product_with(*ups, c.kernels),
                           product_with(*downs, c.kernels),
                           {kind, act, scale, 0},
                           {reinterpret_cast<void*>(x), x_token, 0},
                           {reinterpret_cast<void*>(y), downs->out, 0},
                           reinterpret_cast<const int32_t*>(chosen),
                           reinterpret_cast<const float*>(weights),
                           weighs_input,
                           c.streams_weights,
                           reinterpret_cast<const int32_t*>(slots),
                           up_bank == nullptr ? LoraBank{} : *up_bank,
                           down_bank == nullptr ? LoraBank{} : *down_bank,
                           c.kernels.lora_shrink};
    c.submit(c.kernels.experts, args, tokens);
}

// Fill outputs first..first+count-1 of a weight's panels from [count, in], its rows source_row
// apart; peaks [count]: or 0. Returns whether the source has NaN, if it looks_for_nan.
template <class Context>
bool pack(Context& c, const PackedWeight& weight, int64_t first, int64_t count, uintptr_t source,
          int64_t source_row, uintptr_t panels, uintptr_t peaks, bool looks_for_nan) {
    uint32_t found = 0;
    uint32_t* const has_nan = looks_for_nan ? &found : nullptr;
    const Rows from{reinterpret_cast<void*>(source), source_row, 0};
    const Outputs outputs{first, count};
    if (weight.form == WeightForm::plain) {
        const PackArgs args{weight, from, reinterpret_cast<void*>(panels), outputs, has_nan};
        c.submit(c.kernels.pack, args, weight.out);
        return found != 0;
    }
    const PackQuantizedArgs args{weight,
                                 from,
                                 reinterpret_cast<uint8_t*>(panels),
                                 const_cast<float*>(weight.scales),
                                 reinterpret_cast<const float*>(peaks),
                                 outputs,
                                 has_nan};
    c.submit(c.kernels.pack_quantized, args, weight.out);
    return found != 0;
}

// Fill the panels of a weight from codes, scales and zero points (or 0).
template <class Context>
void pack_coded(Context& c, const PackedWeight& weight, uintptr_t codes, uintptr_t scales,
                uintptr_t zeros, uintptr_t panels) {
    const PackCodedArgs args{
        weight, reinterpret_cast<const uint8_t*>(codes), reinterpret_cast<const void*>(scales),
        reinterpret_cast<const uint8_t*>(zeros), reinterpret_cast<uint8_t*>(panels)};
    c.submit(c.kernels.pack_coded, args, weight.out);
}

// Whether a tensor's numbers have NaN, and the sums of its pieces, two of each. copy: where its
// bytes are written, too, or 0.
template <class Context>
std::pair<bool, std::vector<uint64_t>> scan(Context& c, Type type, uintptr_t data, int64_t bytes,
                                            bool adds_up, uintptr_t copy) {
    const int64_t pieces = (bytes + kScanPiece - 1) / kScanPiece;
    std::vector<ScanResult> results(pieces);
    if (pieces > 0)
        c.submit(c.kernels.scan,
                 ScanArgs{type, at_address<const uint8_t>(data), bytes, adds_up, results.data(),
                          at_address<uint8_t>(copy)},
                 pieces);
    std::pair<bool, std::vector<uint64_t>> found(false, {});
    for (const ScanResult& result : results) {
        found.first |= result.has_nan != 0;
        if (adds_up) found.second.insert(found.second.end(), result.sums, result.sums + 2);
    }
    return found;
}

template <class Context>
void bind_linear(nanobind::module_& m, nanobind::class_<Context>& context) {
    namespace nb = nanobind;
    nb::enum_<Act>(m, "Act")
        .value("none", Act::none)
        .value("silu", Act::silu)
        .value("gelu", Act::gelu)
        .value("gelu_tanh", Act::gelu_tanh)
        .value("relu", Act::relu)
        .value("relu2", Act::relu2);
    nb::enum_<FinishKind>(m, "FinishKind")
        .value("plain", FinishKind::plain)
        .value("gated", FinishKind::gated)
        .value("limited", FinishKind::limited)
        .value("logits", FinishKind::logits)
        .value("partial", FinishKind::partial)
        .value("bounded", FinishKind::bounded);
    nb::enum_<RouterScore>(m, "RouterScore")
        .value("softmax", RouterScore::softmax)
        .value("sigmoid", RouterScore::sigmoid)
        .value("softmax_topk", RouterScore::softmax_topk)
        .value("sigmoid_topk", RouterScore::sigmoid_topk)
        .value("sparsemixer", RouterScore::sparsemixer);
    nb::enum_<WeightForm>(m, "WeightForm")
        .value("plain", WeightForm::plain)
        .value("int8", WeightForm::int8)
        .value("int4", WeightForm::int4)
        .value("codes4", WeightForm::codes4)
        .value("codes8", WeightForm::codes8)
        .value("floats8", WeightForm::floats8)
        .value("table4", WeightForm::table4);
    nb::enum_<RowType>(m, "RowType")
        .value("kept", RowType::kept)
        .value("e4m3", RowType::floats)
        .value("int8", RowType::integers);
    nb::class_<PackedWeight>(m, "PackedWeight")
        .def("__init__",
             [](PackedWeight* self, Type type, WeightForm form, int64_t in, int64_t out,
                int64_t group, uintptr_t panels, uintptr_t scales, uintptr_t bias,
                bool is_weight_only, int64_t segments, bool is_gated) {
                 new (self) PackedWeight{type,
                                         form,
                                         in,
                                         out,
                                         group,
                                         reinterpret_cast<const void*>(panels),
                                         reinterpret_cast<const float*>(scales),
                                         reinterpret_cast<const float*>(bias),
                                         is_weight_only,
                                         segments};
                 self->is_gated = is_gated;
             })
        // The same with what a weight of codes has besides.
        .def("with_codes",
             [](const PackedWeight& self, Type scale_type, bool has_zeros, uintptr_t order,
                RowType rows, int64_t row_group, float row_scale, uintptr_t table) {
                 PackedWeight weight = self;
                 weight.scale_type = scale_type;
                 weight.has_zeros = has_zeros;
                 weight.order = reinterpret_cast<const int64_t*>(order);
                 weight.rounding = {rows, row_group, row_scale};
                 if (table != 0)
                     std::memcpy(weight.table, reinterpret_cast<const float*>(table),
                                 sizeof weight.table);
                 return weight;
             })
        .def_prop_ro("panel_width", [](const PackedWeight&) { return kPanelWidth; })
        // Some of its outputs, whole panels of so many bytes.
        .def("outputs",
             [](const PackedWeight& self, int64_t first, int64_t count, int64_t panel_bytes) {
                 PackedWeight weight = self;
                 weight.out = count;
                 weight.panels = static_cast<const char*>(self.panels) +
                                 first / kPanelWidth * panel_bytes;
                 if (self.scales != nullptr) weight.scales = self.scales + first;
                 if (self.bias != nullptr) weight.bias = self.bias + first;
                 return weight;
             })
        // Copy it to memory of `packed_weight_bytes`, for operations with several.
        .def("store", [](const PackedWeight& self, uintptr_t to) {
            std::memcpy(reinterpret_cast<void*>(to), &self, sizeof self);
        });
    m.attr("packed_weight_bytes") = sizeof(PackedWeight);
    m.attr("panel_width") = kPanelWidth;
    using namespace nb::literals;
    context
        .def("linear", &linear<Context>, "weight"_a, "tokens"_a, "x"_a, "x_token"_a, "y"_a,
             "y_token"_a, "kind"_a, "act"_a, "scale"_a, "softcap"_a, "values"_a, "rows"_a,
             "peaks"_a, "bank"_a.none() = nb::none(), "factors"_a = 0, "slots"_a = 0)
        .def("linear_total", &linear_total<Context>)
        .def("heads_linear", &heads_linear<Context>)
        .def("route", &route<Context>)
        .def("experts", &experts<Context>, "experts"_a, "up"_a, "down"_a, "tokens"_a, "x"_a,
             "x_token"_a, "y"_a, "top_k"_a, "chosen"_a, "weights"_a, "kind"_a, "act"_a, "scale"_a,
             "weighs_input"_a, "slots"_a, "up_bank"_a.none(), "down_bank"_a.none())
        .def("pack", &pack<Context>, "weight"_a, "first"_a, "count"_a, "source"_a, "source_row"_a,
             "panels"_a, "peaks"_a, "looks_for_nan"_a = false)
        .def("scan", &scan<Context>, "type"_a, "data"_a, "bytes"_a, "adds_up"_a, "copy"_a = 0)
        .def("pack_coded", &pack_coded<Context>);
}

}  // namespace quire
