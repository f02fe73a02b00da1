// Copies of blocks, as Python sees them: they hold no lock of the interpreter's.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "bind/kv.hpp"
#include "core/block_copy.hpp"
#include "core/touch.hpp"

namespace quire {

template <class T>
std::vector<T*> at_addresses(const std::vector<uintptr_t>& addresses) {
    std::vector<T*> found;
    found.reserve(addresses.size());
    for (const uintptr_t address : addresses) found.push_back(at_address<T>(address));
    return found;
}

inline nanobind::bytes as_bytes(const BlockSum& sum) {
    return nanobind::bytes(reinterpret_cast<const char*>(sum.data()), sizeof(sum));
}

inline void check_parts(size_t num_parts, size_t num_sizes) {
    if (num_parts != num_sizes) throw std::invalid_argument("parts and sizes differ in number");
}

inline void bind_block_copy(nanobind::module_& m) {
    using namespace nanobind::literals;
    m.def(
        "read_block",
        [](const std::vector<uintptr_t>& sources, const std::vector<size_t>& sizes,
           uintptr_t content) {
            // Streaming stores take whole lines; contents that are only read may lie anywhere, as
            // those that have come over a network do.
            if (content % kContentUnit != 0) throw std::invalid_argument("content is not aligned");
            check_parts(sources.size(), sizes.size());
            BlockSum sum;
            {
                nanobind::gil_scoped_release released;
                sum = read_block(at_addresses<const std::byte>(sources), sizes,
                                 at_address<std::byte>(content));
            }
            return as_bytes(sum);
        },
        "sources"_a, "sizes"_a, "content"_a);
    m.def(
        "write_block",
        [](uintptr_t content, const std::vector<uintptr_t>& targets,
           const std::vector<size_t>& sizes) {
            check_parts(targets.size(), sizes.size());
            BlockSum sum;
            {
                nanobind::gil_scoped_release released;
                sum = write_block(at_address<const std::byte>(content),
                                  at_addresses<std::byte>(targets), sizes);
            }
            return as_bytes(sum);
        },
        "content"_a, "targets"_a, "sizes"_a);
    m.def(
        "sum_block",
        [](uintptr_t content, size_t size) {
            if (size % kContentUnit != 0) throw std::invalid_argument("content is not whole");
            BlockSum sum;
            {
                nanobind::gil_scoped_release released;
                sum = sum_block(at_address<const std::byte>(content), size);
            }
            return as_bytes(sum);
        },
        "content"_a, "size"_a);
    nanobind::class_<TouchAhead>(
        m, "TouchAhead", "Has a thread give pages to memory of `owner`, for as long as it lives.")
        .def(
            "__init__", [](TouchAhead* self, nanobind::handle) { new (self) TouchAhead(); },
            "owner"_a, nanobind::keep_alive<1, 2>())
        .def(
            "touch",
            [](TouchAhead& self, uintptr_t memory, size_t size) {
                self.touch(at_address<std::byte>(memory), size);
            },
            "memory"_a, "size"_a);
}

}  // namespace quire
