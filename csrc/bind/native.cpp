// quire._native: everything that Python sees of the native code.
//
// Tensors pass as addresses, strides and sizes: an address costs Python a tenth of what a DLPack
// capsule does, and a recorded step pays neither. The Python side (quire/kernels/cpu*.py) checks
// shapes and types and keeps tensors alive; nothing here holds a reference to a Python object.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "bind/block_copy.hpp"
#include "bind/exchange.hpp"
#include "bind/kv.hpp"
#include "bind/latent.hpp"
#include "bind/limits.hpp"
#include "bind/linear.hpp"
#include "bind/lora.hpp"
#include "bind/mask.hpp"
#include "bind/pack_ahead.hpp"
#include "bind/sample.hpp"
#include "bind/state.hpp"
#include "core/arena.hpp"
#include "core/level.hpp"
#include "core/library.hpp"
#include "core/memory.hpp"
#include "core/pool.hpp"
#include "core/program.hpp"
#include "core/touch.hpp"
#include "kernels/kernels.hpp"
#include "kernels/tables.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Address = uintptr_t;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

void raise(Status status) {
    if (status == Status::bad_index) throw std::out_of_range("an index is out of range");
    if (status == Status::interrupted) throw nb::python_error();
    if (status == Status::aborted) raise_aborted();
}

// Memory that torch.frombuffer takes; it lives as long as the tensor's storage.
struct Buffer {
    std::byte* data;
    size_t size;
    std::shared_ptr<void> owner;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    auto* buffer = nb::inst_ptr<Buffer>(self);
    return PyBuffer_FillInfo(view, self, buffer->data, static_cast<Py_ssize_t>(buffer->size), 0,
                             flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

Buffer allocate(size_t size, bool touches_start) {
    auto memory = std::make_shared<Memory>(size);
    if (touches_start) touch_start(memory);
    return {memory->data(), size, memory};
}

// A program with the memory of its activations.
struct Recording {
    int64_t capacity;  // the most tokens that it can be replayed for
    Program program;
    std::shared_ptr<Arena> arena = std::make_shared<Arena>();
    std::vector<std::shared_ptr<void>> held = {};  // what entries point to

    Buffer take(size_t size) {
        std::byte* data = arena->take(size);
        std::shared_ptr<void> owner(data, [arena = arena](void* block) {
            arena->give_back(static_cast<std::byte*>(block));
        });
        return {data, size, owner};
    }

    // Memory of the arena that may be used again meanwhile.
    Buffer borrow(Address address, size_t size) const {
        return {static_cast<std::byte*>(pointer(address)), size, arena};
    }
};

// Where operations go: to the kernels of one level on one pool, or into a recording.
struct Context {
    std::shared_ptr<Pool> pool;
    Level level;
    Kernels kernels;
    std::shared_ptr<Recording> recording;
    bool streams_weights = false;  // of products from now on, see PackedWeight

    Context(std::shared_ptr<Pool> threads, const std::string& level_name)
        : pool(std::move(threads)), level(find_level(level_name)), kernels(kernels_for(level)) {}

    // Have the recording keep what the next call points to.
    void hold(std::shared_ptr<void> object) {
        if (recording) recording->held.push_back(std::move(object));
    }

    template <class Args>
    void submit(Kernel<Args> kernel, const Args& args, int64_t tokens) {
        if (recording) {
            recording->program.append(kernel, args);
            return;
        }
        Status status;
        {
            nb::gil_scoped_release released;
            Pool::Lease lease(*pool);
            status = kernel(args, tokens, *pool);
        }
        raise(status);
    }
};

// Run the recording; entry n of the program that is not native is calls[n](tokens).
void replay(Context& context, const Recording& recording, int64_t tokens, nb::list calls) {
    if (tokens < 0 || tokens > recording.capacity)
        throw std::invalid_argument("a program of capacity " + std::to_string(recording.capacity) +
                                    " cannot run " + std::to_string(tokens) + " tokens");
    const auto foreign = [&](int number, int64_t count) {
        nb::gil_scoped_acquire acquired;
        nb::object arguments = nb::make_tuple(count);
        PyObject* result = PyObject_CallObject(nb::object(calls[number]).ptr(), arguments.ptr());
        Py_XDECREF(result);
        return result == nullptr ? Status::interrupted : Status::ok;
    };
    Status status;
    {
        nb::gil_scoped_release released;
        status = recording.program.replay(*context.pool, tokens, foreign);
    }
    raise(status);
}

// Seconds that a region of empty tiles takes on average: what an operation costs besides its work.
double time_regions(Pool& pool, int num_regions, int64_t num_tiles) {
    nb::gil_scoped_release released;
    Pool::Lease lease(pool);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < num_regions; ++i)
        run_tiles(pool, num_tiles, [](const void*, int64_t, int) {}, nullptr);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    return taken.count() / num_regions;
}

std::vector<std::pair<std::string, std::string>> levels() {
    std::vector<std::pair<std::string, std::string>> found;
    for (Level level : compiled_levels()) found.emplace_back(name(level), refusal(level));
    return found;
}

void bind_memory(nb::module_& m) {
    nb::class_<Buffer>(m, "Buffer", nb::type_slots(buffer_slots))
        .def_ro("size", &Buffer::size)
        .def_prop_ro("address", [](const Buffer& b) { return reinterpret_cast<Address>(b.data); });
    m.def("allocate", &allocate, "size"_a, "touches_start"_a = false,
          "Zeroed memory; from 2 MiB on the kernel is asked for huge pages. touches_start: a thread "
          "touches the first one.");
    m.def(
        "board",
        [](const std::shared_ptr<Exchange>& exchange, size_t size) {
            return Buffer{exchange->board(size), size, exchange};
        },
        "exchange"_a, "size"_a, "Memory that all ranks of an exchange see.");
    m.def("prepare_memory", &prepare_memory, "size"_a,
          "Have a thread touch pages that `allocate` takes from then on.");
    m.def("end_preparation", &end_preparation, nb::call_guard<nb::gil_scoped_release>(),
          "Free those that nobody has taken.");
    m.def("load_ahead", &load_ahead, "paths"_a,
          "Have a thread load shared libraries; does nothing after the first call.");
    m.def("wait_for_libraries", &wait_for_libraries, nb::call_guard<nb::gil_scoped_release>(),
          "Wait until they are loaded.");
}

void bind_pool(nb::module_& m) {
    nb::class_<Pool>(m, "Pool")
        .def(nb::init<int>(), "size"_a)
        .def_prop_ro("size", &Pool::size)
        .def_prop_ro("num_started", &Pool::num_started)
        .def("resize", &Pool::resize, "size"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("time_regions", &time_regions, "num_regions"_a, "num_tiles"_a);
}

void bind_program(nb::module_& m) {
    nb::class_<Recording>(m, "Recording")
        .def("__init__",
             [](Recording* self, int64_t capacity) { new (self) Recording{capacity, {}}; })
        .def_ro("capacity", &Recording::capacity)
        .def("append_foreign",
             [](Recording& self, int number) { self.program.append_foreign(number); })
        .def("take", &Recording::take, "size"_a)
        .def("borrow", &Recording::borrow, "address"_a, "size"_a)
        .def("owns", [](const Recording& self, Address a) { return self.arena->owns(pointer(a)); })
        .def_prop_ro("num_bytes", [](const Recording& self) { return self.arena->num_bytes(); })
        .def("__len__", [](const Recording& self) { return self.program.num_entries(); });
}

void bind_pack_ahead(nb::module_& m) {
    // A piece of memory that weights are packed into; what asks for its contents waits.
    nb::class_<PackedBlock>(m, "PackedBlock")
        .def_prop_ro("size", &PackedBlock::size)
        .def("memory",
             [](std::shared_ptr<PackedBlock> self) {
                 return Buffer{self->memory()->data(), self->size(), self};
             })
        .def("wait", &PackedBlock::wait, nb::call_guard<nb::gil_scoped_release>())
        // The weight, whose only one it is, for products that do not wait. Valid as long as the
        // memory.
        .def(
            "unpacked",
            [](const PackedBlock& self, const PackedWeight& packed) {
                PackedWeight weight = packed;
                weight.rows = self.rows();
                return weight;
            },
            "packed"_a);
    nb::class_<PackAhead>(m, "PackAhead")
        .def(nb::init<int, const std::string&>(), "num_threads"_a, "level"_a)
        .def("add_file", &PackAhead::add_file, "path"_a)
        .def("add_block", &PackAhead::add_block, "size"_a)
        .def("add_rows", &PackAhead::add_rows, "block"_a, "weight"_a, "offset"_a, "first"_a,
             "count"_a, "file"_a, "at"_a)
        .def("start", &PackAhead::start)
        .def("take", &PackAhead::take, "block"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("wait", &PackAhead::wait, nb::call_guard<nb::gil_scoped_release>())
        .def("end_taking", &PackAhead::end_taking)
        .def_prop_ro("has_ended", &PackAhead::has_ended)
        .def("wait_for_end", &PackAhead::wait_for_end, nb::call_guard<nb::gil_scoped_release>())
        .def("stop", &PackAhead::stop, nb::call_guard<nb::gil_scoped_release>());
}

void norm(Context& c, Type type, int64_t tokens, int64_t rows_per_token, int64_t width, Address x,
          int64_t x_token, int64_t x_row, Address out, NormKind kind, float eps, Address weight,
          Address bias, int64_t param_stride) {
    const Rows to{pointer(out), rows_per_token * width, width};
    const NormParams params{kind, eps, pointer(weight), pointer(bias), param_stride};
    const NormArgs args{type, rows_per_token, width, {pointer(x), x_token, x_row}, to, params};
    c.submit(c.kernels.norm, args, tokens);
}

AddArgs add_args(Type type, int64_t width, float scale, Address x, int64_t x_token, Address delta,
                 int64_t delta_token, Address sum) {
    return {type,
            width,
            scale,
            {pointer(x), x_token, 0},
            {pointer(delta), delta_token, 0},
            {pointer(sum), width, 0}};
}

void add(Context& c, Type type, int64_t tokens, int64_t width, float scale, Address x,
         int64_t x_token, Address delta, int64_t delta_token, Address sum) {
    const AddArgs args = add_args(type, width, scale, x, x_token, delta, delta_token, sum);
    c.submit(c.kernels.add, args, tokens);
}

void add_norm(Context& c, Type type, int64_t tokens, int64_t width, float scale, Address x,
              int64_t x_token, Address delta, int64_t delta_token, Address sum, Address out,
              NormKind kind, float eps, Address weight, Address bias) {
    const AddNormArgs args{add_args(type, width, scale, x, x_token, delta, delta_token, sum),
                           {pointer(out), width, 0},
                           {kind, eps, pointer(weight), pointer(bias), 0}};
    c.submit(c.kernels.add_norm, args, tokens);
}

void embed(Context& c, Type type, int64_t tokens, int64_t width, float scale, Address ids,
           Address table, int64_t table_rows, int64_t table_stride, const PackedWeight* packed,
           Address positions, Address position_table, int64_t position_rows,
           int64_t position_stride, Address out) {
    const EmbedArgs args{type,
                         width,
                         scale,
                         static_cast<const int64_t*>(pointer(ids)),
                         pointer(table),
                         table_rows,
                         table_stride,
                         packed != nullptr,
                         packed == nullptr ? nullptr : packed->rows,
                         static_cast<const int64_t*>(pointer(positions)),
                         pointer(position_table),
                         position_rows,
                         position_stride,
                         {pointer(out), width, 0}};
    c.submit(c.kernels.embed, args, tokens);
}

void scale_gate(Context& c, Type type, int64_t tokens, int64_t width, int64_t gate_width, Address y,
                int64_t y_token, Address gate, int64_t gate_token, Address out) {
    const ScaleGateArgs args{type,
                             width,
                             gate_width,
                             {pointer(y), y_token, 0},
                             {pointer(gate), gate_token, 0},
                             {pointer(out), width, 0}};
    c.submit(c.kernels.scale_gate, args, tokens);
}

void sum_chunks(Context& c, Type type, int64_t prompts, int64_t width, int64_t span, Address x,
                int64_t x_token, int64_t tokens, Address chunks, Address spans, Address rest) {
    const SumChunksArgs args{type,
                             width,
                             span,
                             {pointer(x), x_token, 0},
                             tokens,
                             static_cast<const int64_t*>(pointer(chunks)),
                             static_cast<float*>(pointer(spans)),
                             static_cast<float*>(pointer(rest))};
    c.submit(c.kernels.sum_chunks, args, prompts);
}

void bind_context(nb::module_& m) {
    nb::class_<Context> context(m, "Context");
    context.def(nb::init<std::shared_ptr<Pool>, const std::string&>(), "pool"_a, "level"_a)
        .def_prop_ro("level", [](const Context& c) { return name(c.level); })
        .def_rw("streams_weights", &Context::streams_weights)
        .def("begin", [](Context& c, std::shared_ptr<Recording> r) { c.recording = std::move(r); })
        .def("end", [](Context& c) { c.recording.reset(); })
        .def("replay", &replay, "recording"_a, "tokens"_a, "calls"_a)
        .def("norm", &norm)
        .def("add", &add)
        .def("add_norm", &add_norm)
        .def("embed", &embed, "type"_a, "tokens"_a, "width"_a, "scale"_a, "ids"_a, "table"_a,
             "table_rows"_a, "table_stride"_a, "packed"_a.none(), "positions"_a,
             "position_table"_a, "position_rows"_a, "position_stride"_a, "out"_a)
        .def("scale_gate", &scale_gate)
        .def("sum_chunks", &sum_chunks);
    bind_exchange(m, context);
    bind_kv(m, context);
    bind_latent(m, context);
    bind_limits(m, context);
    bind_linear(m, context);
    bind_lora(m, context);
    bind_mask(context);
    bind_sample(context);
    bind_state(context);
}

}  // namespace
}  // namespace quire

NB_MODULE(_native, m) {
    using namespace quire;
    nb::set_leak_warnings(false);  // tensors on our memory may live until the process ends
    nb::enum_<Type>(m, "Type")
        .value("f32", Type::f32)
        .value("bf16", Type::bf16)
        .value("f16", Type::f16);
    nb::enum_<NormKind>(m, "NormKind")
        .value("rms", NormKind::rms)
        .value("rms_late_cast", NormKind::rms_late_cast)
        .value("rms1p", NormKind::rms1p)
        .value("layer", NormKind::layer)
        .value("layer1p", NormKind::layer1p)
        .value("none", NormKind::none);
    m.def("levels", &levels, "(name, why it cannot run here or \"\") of every compiled level.");
    m.def("best_level", [] { return name(best_level()); });
    bind_memory(m);
    bind_pool(m);
    bind_program(m);
    bind_context(m);
    bind_pack_ahead(m);
    bind_block_copy(m);
}
