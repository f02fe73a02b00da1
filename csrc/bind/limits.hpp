// Timing the loops of kernels/limits.cpp, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <utility>

#include "core/memory.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// Seconds until `action` returns.
template <class Action>
double seconds_of(const Action& action) {
    const auto start = std::chrono::steady_clock::now();
    action();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Seconds to read `pieces` of kReadPiece bytes.
template <class Context>
double time_read(Context& c, uintptr_t data, int64_t pieces) {
    const ReadArgs args{reinterpret_cast<const void*>(data)};
    return seconds_of([&] { c.submit(c.kernels.read, args, pieces); });
}

// Operations (a multiplication and an addition are two) and the seconds they took.
template <class Context>
std::pair<int64_t, double> time_multiply_add(Context& c, Operand operand, int64_t tiles,
                                             int64_t rounds) {
    int64_t operations = 0;
    const Memory start(kStartBytes);
    const MultiplyArgs args{operand, rounds, start.data(), &operations};
    const double seconds = seconds_of([&] { c.submit(c.kernels.multiply_add, args, tiles); });
    return {operations, seconds};
}

template <class Context>
void bind_limits(nanobind::module_& m, nanobind::class_<Context>& context) {
    namespace nb = nanobind;
    nb::enum_<Operand>(m, "Operand")
        .value("f32", Operand::f32)
        .value("bf16", Operand::bf16)
        .value("int8", Operand::int8);
    m.attr("read_piece") = kReadPiece;
    context.def("time_read", &time_read<Context>, nb::arg("data"), nb::arg("pieces"))
        .def("time_multiply_add", &time_multiply_add<Context>, nb::arg("operand"),
             nb::arg("tiles"), nb::arg("rounds"));
}

}  // namespace quire
