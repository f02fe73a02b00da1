// Matrix products, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels/kernels.hpp"

namespace quire {

// y [tokens, width of the finish] from x, its rows x_token apart.
template <class Context>
void linear(Context& c, const PackedWeight& weight, int64_t tokens, uintptr_t x, int64_t x_token,
            uintptr_t y, int64_t y_token, FinishKind kind, Act act, float scale, float softcap) {
    const LinearArgs args{weight,
                          {reinterpret_cast<void*>(x), x_token, 0},
                          {reinterpret_cast<void*>(y), y_token, 0},
                          {kind, act, scale, softcap}};
    c.submit(c.kernels.linear, args, tokens);
}

// Fill the panels of a weight from [out, in], its rows source_row apart.
template <class Context>
void pack(Context& c, const PackedWeight& weight, uintptr_t source, int64_t source_row,
          uintptr_t panels) {
    const PackArgs args{weight.type,
                        weight.in,
                        {reinterpret_cast<void*>(source), source_row, 0},
                        reinterpret_cast<void*>(panels)};
    c.submit(c.kernels.pack, args, weight.out);
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
        .value("logits", FinishKind::logits);
    nb::class_<PackedWeight>(m, "PackedWeight")
        .def("__init__", [](PackedWeight* self, Type type, int64_t in, int64_t out,
                            uintptr_t panels, uintptr_t bias) {
            new (self) PackedWeight{type, in, out, reinterpret_cast<const void*>(panels),
                                    reinterpret_cast<const float*>(bias)};
        });
    m.attr("panel_width") = kPanelWidth;
    context.def("linear", &linear<Context>).def("pack", &pack<Context>);
}

}  // namespace quire
