// The exchange between processes, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <system_error>

#include "bind/kv.hpp"
#include "core/exchange.hpp"

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
            int64_t stride, int64_t row_bytes, uintptr_t out) {
    const GatherArgs args{exchange.get(), at_address<const void>(x), stride, row_bytes,
                          at_address<void>(out)};
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
        .def("broadcast", &broadcast, "data"_a, "num_bytes"_a);
    context.def("gather", &gather<Context>);
    context.def("largest", &largest<Context>);
}

}  // namespace quire
