// Products with weights in floating point.

#include "kernels/element.hpp"
#include "kernels/float_product.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pack_panel.hpp"
#include "kernels/product.hpp"
#include "kernels/reading.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

template <class E>
class FloatProduct {
   public:
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        return FloatRows<E>::num_bytes(a.weight, rows);
    }

    static constexpr int kMostPanels = 4;

    FloatProduct(const LinearArgs& a, int64_t rows, void* memory)
        : a_(a), x_(a.weight, rows, memory) {}

    int64_t segments() const { return x_.segments; }

    void prepare(int64_t row, int64_t token) const { x_.prepare(row, row_of<E>(a_.x, token, 0)); }

    template <int P>
    void multiply(int64_t panel, int64_t segment, float* sums, int64_t stride) const {
        const int64_t panel_size = (a_.weight.in + 1) / 2 * 2 * kPanel;
        const E* weight = static_cast<const E*>(a_.weight.panels) + panel * panel_size;
        x_.template multiply<P>(segment, sums, stride,
                                Apart{panel_size, a_.weight.is_streamed && x_.rows == 1},
                                [&](int64_t pair, int64_t) { return weight + pair * 2 * kPanel; });
    }

    F32 concluded(int64_t, F32 sum) const { return sum; }

   private:
    const LinearArgs& a_;
    const FloatRows<E> x_;
};

// A tile of a weight that is not packed yet: its panels are packed into memory that stays in the
// cache of the core that multiplies them. The bits are those of packed ones.
template <class E>
void multiply_unpacked(const Chunk<FloatProduct<E>>& chunk, void* prepared, E* panels, int64_t tile,
                       Pool& pool, int worker) {
    LinearArgs a = chunk.a;
    const int64_t panel_size = (a.weight.in + 1) / 2 * 2 * kPanel;
    const int64_t end = (tile + 1) * chunk.per_tile;
    const int64_t first = tile * chunk.per_tile * chunk.per_group;
    const int64_t stop = (end < chunk.groups ? end : chunk.groups) * chunk.per_group;
    // panels are counted from the beginning of the weight
    const uintptr_t start = reinterpret_cast<uintptr_t>(panels) - first * panel_size * sizeof(E);
    a.weight.panels = reinterpret_cast<const void*>(start);
    const UnpackedRows& rows = *a.weight.rows;
    for (int64_t panel = first; panel < stop; ++panel)
        for (const SourceRows *part = rows.parts, *last = part + rows.num_parts; part < last;
             ++part) {
            const Rows source{const_cast<void*>(part->source), a.weight.in, 0};
            const PackArgs args{a.weight, source, reinterpret_cast<void*>(start), part->outputs,
                                nullptr};
            pack_panel<E>(args, panel, Reuse::soon);
        }
    Chunk<FloatProduct<E>>(a, chunk.first, chunk.rows, prepared, pool)
        .multiply_tile(tile, pool, worker);
}

// As `multiply`, out of rows.
template <class E>
Status multiply_rows_of(const LinearArgs& a, int64_t tokens, Pool& pool) {
    using Product = FloatProduct<E>;
    const int64_t most = chunk_rows<Product>(a, tokens);
    const int64_t panel_size = (a.weight.in + 1) / 2 * 2 * kPanel;
    for (int64_t first = 0; first < tokens; first += most) {
        const int64_t rows = tokens - first < most ? tokens - first : most;
        const int64_t of_rows = whole_lines(Product::num_bytes(a, rows));
        const Chunk<Product> plan(a, first, rows, nullptr, pool);
        const int64_t of_tile = plan.per_tile * plan.per_group * panel_size;
        auto* memory = static_cast<char*>(
            shared_scratch(pool, of_rows + num_threads(pool) * of_tile * sizeof(E)));
        const Chunk<Product> chunk(a, first, rows, memory, pool);
        parallel_rows(pool, rows, a.weight.in, [&](int64_t row, int64_t stop) {
            for (; row < stop; ++row) chunk.product.prepare(row, first + row);
        });
        auto* panels = reinterpret_cast<E*>(memory + of_rows);
        parallel(pool, chunk.num_tiles(), [&](int64_t tile, int worker) {
            multiply_unpacked(chunk, memory, panels + worker * of_tile, tile, pool, worker);
        });
    }
    return Status::ok;
}

template <class E>
Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    const Reading reading(a.weight.rows);
    if (reading.is_needed()) return multiply_rows_of<E>(a, tokens, pool);
    return multiply<FloatProduct<E>>(a, tokens, pool);
}

template <class E>
Status grouped(const GroupedArgs& a, int64_t, Pool& pool) {
    return multiply_groups<FloatProduct<E>>(a, pool);
}

template <class E>
Status heads_linear(const HeadsArgs& a, int64_t tokens, Pool& pool) {
    return multiply_heads<FloatProduct<E>>(a, tokens, pool, sizeof(E));
}

template <class E>
void fill_type(Kernels& table, Type type) {
    table.linear[static_cast<int>(type)] = {linear<E>, grouped<E>};
    table.heads_linear[static_cast<int>(type)] = heads_linear<E>;
}

}  // namespace

// A level that has an instruction for bf16 has nothing new for other types.
void fill_linear(Kernels& table) {
    fill_type<BF16>(table, Type::bf16);
#if !defined(QUIRE_BF16_DOTS)
    fill_type<float>(table, Type::f32);
    fill_type<F16>(table, Type::f16);
#endif
}

}  // namespace quire::QUIRE_LEVEL
