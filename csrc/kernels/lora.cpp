// Low-rank adapters of products: a @ x here, b times that where the product's sums are finished
// (finish.cpp), so that neither needs memory for what is added.
//
// A row's sums depend on its adapter and on the shapes alone: each factor is summed by itself, the
// segments of the inputs in the order of ops/segments.py.
#include "kernels/lora.hpp"

#include "core/parallel.hpp"
#include "kernels/tiles.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

constexpr int64_t kRanks = 8;         // that a unit of work has
constexpr int64_t kUnitWork = 32768;  // multiplications of a tile, at least

// sums[j] = a[j] . x for N rows of A, `stride` apart, over `width` inputs.
template <int N, class X, class E>
inline void dot_rows(const X* x, const E* a, int64_t stride, int64_t width, float* sums) {
    F32 even[N], odd[N];
    for (int j = 0; j < N; ++j) even[j] = odd[j] = splat(0);
    int64_t i = 0;
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
        const F32 first = load(x + i), second = load(x + i + kLanes);
        for (int j = 0; j < N; ++j) {
            __builtin_prefetch(a + (j + N) * stride + i, 0, 2);  // the ranks after these
            even[j] = fma(load(a + j * stride + i), first, even[j]);
            odd[j] = fma(load(a + j * stride + i + kLanes), second, odd[j]);
        }
    }
    const auto add_last = [&](auto lanes) {
        const F32 last = get(lanes, x + i);
        for (int j = 0; j < N; ++j) even[j] = fma(get(lanes, a + j * stride + i), last, even[j]);
    };
    if (i + kLanes <= width) add_last(Whole{}), i += kLanes;
    if (i < width) add_last(Part{width - i});
    for (int j = 0; j < N; ++j) sums[j] = reduce(add(even[j], odd[j]));
}

// The factors of ranks [first, stop) of one segment, at `sums` + rank.
template <class X, class E>
inline void dot_ranks(const X* x, const E* a, int64_t stride, int64_t width, int64_t first,
                      int64_t stop, float* sums) {
    int64_t r = first;
    for (; r + 4 <= stop; r += 4) dot_rows<4>(x, a + r * stride, stride, width, sums + r);
    for (; r < stop; ++r) dot_rows<1>(x, a + r * stride, stride, width, sums + r);
}

// A unit: some ranks of one part for one row.
struct Unit {
    int64_t token, slot, part, first, stop;
};

template <class X, class E>
void shrink_unit(const LoraShrinkArgs& a, const Unit& unit) {
    const LoraBank& bank = a.bank;
    const int64_t width = bank.in / bank.segments, factors = bank.parts * bank.max_rank;
    const int64_t row = (unit.slot * bank.parts + unit.part) * bank.max_rank;
    const X* x = row_of<X>(a.x, unit.token, 0);
    const E* rows = static_cast<const E*>(bank.a) + row * bank.in;
    float parts[4][kRanks];
    for (int64_t s = 0; s < bank.segments; ++s)
        dot_ranks(x + s * width, rows + unit.first * bank.in + s * width, bank.in, width, 0,
                  unit.stop - unit.first, parts[s]);
    const int64_t kept = a.is_partial ? bank.segments : 1;
    float* out = a.factors + unit.token * kept * factors + unit.part * bank.max_rank + unit.first;
    for (int64_t j = 0; j < unit.stop - unit.first; ++j) {
        if (a.is_partial) {
            for (int64_t s = 0; s < bank.segments; ++s) out[s * factors + j] = parts[s][j];
            continue;
        }
        float sum = parts[0][j];
        if (bank.segments > 1) sum += parts[1][j];
        if (bank.segments > 2) sum += parts[2][j] + parts[3][j];
        out[j] = sum;
    }
}

// Write which rows have an adapter that adds to the product, and whether there are any.
bool find_used(const LoraShrinkArgs& a, int64_t tokens) {
    bool any = false;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t slot = a.slots[t];
        bool has_ranks = false;
        for (int64_t p = 0; slot >= 0 && p < a.bank.parts; ++p)
            has_ranks |= a.bank.ranks[slot * a.bank.parts + p] > 0;
        a.used[t] = has_ranks ? static_cast<int32_t>(slot) : -1;
        any |= has_ranks;
    }
    return any;
}

Status lora_shrink(const LoraShrinkArgs& a, int64_t tokens, Pool& pool) {
    if (!find_used(a, tokens)) return Status::ok;
    const LoraBank& bank = a.bank;
    const int64_t of_part = (bank.max_rank + kRanks - 1) / kRanks, of_row = bank.parts * of_part;
    const int64_t work = bank.in * kRanks, units = tokens * of_row;
    const int64_t per_tile = work < kUnitWork ? kUnitWork / (work + !work) : 1;
    parallel(pool, (units + per_tile - 1) / per_tile, [&](int64_t tile, int) {
        const int64_t end = (tile + 1) * per_tile, stop = end < units ? end : units;
        for (int64_t i = tile * per_tile; i < stop; ++i) {
            const int64_t token = i / of_row, slot = a.used[token];
            if (slot < 0) continue;
            const int64_t part = i % of_row / of_part, first = i % of_part * kRanks;
            const int64_t rank = bank.ranks[slot * bank.parts + part];
            const Unit unit{token, slot, part, first,
                            first + kRanks < rank ? first + kRanks : rank};
            if (unit.first >= unit.stop) continue;
            with_type(a.type, [&](auto x) {
                with_type(bank.type,
                          [&](auto type) { shrink_unit<decltype(x), decltype(type)>(a, unit); });
            });
        }
    });
    return Status::ok;
}

Status lora_expand(const LoraExpandArgs& a, int64_t tokens, Pool& pool) {
    const LoraAddend& lora = a.lora;
    const int64_t stride = lora.bank.parts * lora.bank.max_rank;
    parallel_rows(pool, tokens, a.width, [&](int64_t token, int64_t stop) {
        for (; token < stop; ++token) {
            float* values = a.values + token * a.width;
            __builtin_memset(values, 0, sizeof(float) * a.width);
            if (lora.slots[token] < 0) continue;
            for (int64_t lane = 0; lane < a.width; lane += kPanelWidth)
                add_lora(lora.bank, lora.slots[token], lora.factors + token * stride, lane,
                         a.width - lane < kPanelWidth ? a.width - lane : kPanelWidth,
                         values + lane);
        }
    });
    return Status::ok;
}

template <class E>
void embed_row(const LoraEmbedArgs& a, int64_t token, const float* factors) {
    const E* x = row_of<E>(a.x, token, 0);
    E* out = row_of<E>(a.out, token, 0);
    const F32 scale = splat(a.scale);
    for (int64_t lane = 0; lane < a.width; lane += kPanelWidth) {
        const int64_t count = a.width - lane < kPanelWidth ? a.width - lane : kPanelWidth;
        float added[kPanelWidth] = {};
        if (factors != nullptr) add_lora(a.bank, a.slots[token], factors, lane, count, added);
        each(count, [&](auto lanes, int64_t i) {
            const F32 own = get(lanes, x + lane + i);
            put(lanes, out + lane + i,
                factors == nullptr ? own : fma(scale, get(lanes, added + i), own));
        });
    }
}

// The values of A for an id, widened; null where the row has no adapter that adds to the table.
const float* factors_of(const LoraEmbedArgs& a, int64_t token, float* memory) {
    const int64_t slot = a.slots[token], id = a.ids[token];
    if (slot < 0 || id < 0 || id >= a.bank.in || a.bank.ranks[slot] == 0) return nullptr;
    with_type(a.bank.type, [&](auto type) {
        using E = decltype(type);
        const E* from = static_cast<const E*>(a.bank.a) + (slot * a.bank.in + id) * a.bank.max_rank;
        each(a.bank.ranks[slot],
             [&](auto lanes, int64_t i) { put(lanes, memory + i, get(lanes, from + i)); });
    });
    return memory;
}

Status lora_embed(const LoraEmbedArgs& a, int64_t tokens, Pool& pool) {
    parallel(pool, tokens, [&](int64_t token, int worker) {
        auto* memory = static_cast<float*>(scratch(pool, worker, sizeof(float) * a.bank.max_rank));
        const float* factors = factors_of(a, token, memory);
        with_type(a.type, [&](auto type) { embed_row<decltype(type)>(a, token, factors); });
    });
    return Status::ok;
}

}  // namespace

void fill_lora(Kernels& table) {
    table.lora_shrink = lora_shrink;
    table.lora_expand = lora_expand;
    table.lora_embed = lora_embed;
}

}  // namespace quire::QUIRE_LEVEL
