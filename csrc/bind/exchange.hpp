// The exchange between processes, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <system_error>

#include "bind/kv.hpp"
#include "core/exchange.hpp"
#include "kernels/tables.hpp"

namespace quire {

// The error of groups of every kind is Python's. Imported where it is raised, as nothing else here
// knows the package.
[[noreturn]] inline void raise_aborted() {
    const nanobind::object kind =
        nanobind::module_::import_("quire.distributed.worker_group").attr("ExchangeAborted");
    PyErr_SetString(kind.ptr(), abort_reason().c_str());
    throw nanobind::python_error();
}

template <class Context>
void gather(Context& c, std::shared_ptr<Exchange> exchange, int64_t tokens, uintptr_t x,
            int64_t stride, int64_t row_bytes, uintptr_t out, bool to_first) {
    const GatherArgs args{exchange.get(), at_address<const void>(x), stride, row_bytes,
                          at_address<void>(out), to_first};
    c.hold(exchange);
    c.submit(&exchange_gather, args, tokens);
}

template <class Context>
void largest(Context& c, std::shared_ptr<Exchange> exchange, int64_t tokens, uintptr_t x,
             int64_t stride, uintptr_t out) {
    const LargestArgs args{exchange.get(), at_address<const void>(x), stride,
                           at_address<void>(out)};
    c.hold(exchange);
    c.submit(&exchange_largest, args, tokens);
}

template <class Context>
void meet(Context& c, std::shared_ptr<Exchange> exchange) {
    const MeetArgs args{exchange.get()};
    c.hold(exchange);
    c.submit(&exchange_meet, args, 1);
}

// y [tokens, out], all workers' product, from x, its rows x_token apart, of this one. peaks: those
// of whole rows, or 0; scales: of a weight that rounds rows, or 0; bias: or 0.
template <class Context>
void shared_product(Context& c, std::shared_ptr<Exchange> exchange, const PackedWeight& weight,
                    int64_t tokens, uintptr_t x, int64_t x_token, uintptr_t peaks, bool are_whole,
                    bool rounds_rows, uintptr_t scales, uintptr_t bias, Type type, uintptr_t y) {
    const int64_t width = weight.out, size = exchange->size();
    if (exchange->capacity(width * static_cast<int64_t>(sizeof(float))) < 1)
        throw std::invalid_argument("a row of the product does not fit into the exchange");
    const auto* of_rows = at_address<const float>(peaks);
    LinearArgs product{weight,
                       {at_address<void>(x), x_token, 0},
                       {},
                       {FinishKind::partial, Act::none, 1, 0},
                       {},
                       of_rows};
    product.weight.is_streamed = c.streams_weights;
    const LinearTotalArgs sum{type,
                              width,
                              size,
                              are_whole,
                              nullptr,
                              rounds_rows ? at_address<const float>(scales) : nullptr,
                              rounds_rows ? of_rows : nullptr,
                              at_address<const float>(bias),
                              {},
                              at_address<void>(y)};
    const SharedProductArgs args{exchange.get(),
                                 product_with(weight, c.kernels).linear,
                                 c.kernels.linear_total,
                                 product,
                                 sum};
    c.hold(exchange);
    c.submit(&shared_product, args, tokens);
}

inline void broadcast(Exchange& exchange, uintptr_t data, int64_t num_bytes) {
    Status status;
    {
        nanobind::gil_scoped_release released;
        status = exchange.broadcast(at_address<std::byte>(data), num_bytes);
    }
    if (status != Status::ok) raise_aborted();
}

template <class Context>
void bind_exchange(nanobind::module_& m, nanobind::class_<Context>& context) {
    using namespace nanobind::literals;
    nanobind::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::system_error& error) {
            const nanobind::tuple args = nanobind::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, args.ptr());
        }
    });
    nanobind::class_<Exchange>(m, "Exchange")
        .def(nanobind::init<int, int>(), "fd"_a, "rank"_a)
        .def_static("open_region", &Exchange::open_region, "size"_a, "slot_bytes"_a)
        .def_prop_ro("size", &Exchange::size)
        .def_prop_ro("slot_bytes", &Exchange::slot_bytes)
        .def_prop_ro("aborted", &Exchange::aborted)
        .def("abort", &Exchange::abort, "reason"_a)
        .def("reset", &Exchange::reset)
        .def("counts", &Exchange::counts)
        .def("waits",
             [](const Exchange& exchange) {
                 std::vector<std::pair<uint64_t, uint64_t>> found;
                 for (const Waits& waits : exchange.waits())
                     found.emplace_back(waits.ns, waits.sleeps);
                 return found;
             })
        .def("broadcast", &broadcast, "data"_a, "num_bytes"_a);
    context.def("gather", &gather<Context>);
    context.def("meet", &meet<Context>);
    context.def("largest", &largest<Context>);
    context.def("shared_product", &shared_product<Context>);
}

}  // namespace quire
