// The operations that treat each row by itself: norms, sums, gates, embedding; and sums of rows.

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/norm.hpp"
#include "kernels/pairs.hpp"
#include "kernels/quantize.hpp"
#include "kernels/reading.hpp"
#include "kernels/tiles.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

Status norm(const NormArgs& a, int64_t tokens, Pool& pool) {
    with_type(a.type, [&](auto type) {
        using E = decltype(type);
        const NormRow<E> normalise = norm_row_of<E>(a.norm.kind);
        parallel_rows(pool, tokens * a.rows_per_token, a.width, [&](int64_t first, int64_t stop) {
            for (int64_t i = first; i < stop; ++i) {
                const int64_t token = i / a.rows_per_token, row = i % a.rows_per_token;
                normalise(row_of<E>(a.x, token, row), row_of<E>(a.out, token, row), a.width, a.norm,
                          row);
            }
        });
    });
    return Status::ok;
}

// The product is rounded before the sum.
template <class E>
inline void add_row(const AddArgs& a, int64_t token) {
    const E* x = row_of<E>(a.x, token, 0);
    const E* delta = row_of<E>(a.delta, token, 0);
    E* sum = row_of<E>(a.sum, token, 0);
    if (a.scale == 1.0f) {
        each(a.width, [&](auto lanes, int64_t i) {
            put(lanes, sum + i, add(get(lanes, x + i), get(lanes, delta + i)));
        });
        return;
    }
    const F32 scale = splat(a.scale);
    each(a.width, [&](auto lanes, int64_t i) {
        const F32 product = rounded(E{}, mul(get(lanes, delta + i), scale));
        put(lanes, sum + i, add(get(lanes, x + i), product));
    });
}

Status add(const AddArgs& a, int64_t tokens, Pool& pool) {
    with_type(a.type, [&](auto type) {
        parallel_rows(pool, tokens, a.width, [&](int64_t first, int64_t stop) {
            for (int64_t token = first; token < stop; ++token) add_row<decltype(type)>(a, token);
        });
    });
    return Status::ok;
}

Status add_norm(const AddNormArgs& a, int64_t tokens, Pool& pool) {
    with_type(a.add.type, [&](auto type) {
        using E = decltype(type);
        const NormRow<E> normalise = norm_row_of<E>(a.norm.kind);
        parallel_rows(pool, tokens, a.add.width, [&](int64_t first, int64_t stop) {
            for (int64_t token = first; token < stop; ++token) {
                add_row<E>(a.add, token);  // the row is in the nearest cache from here on
                normalise(row_of<E>(a.add.sum, token, 0), row_of<E>(a.out, token, 0), a.add.width,
                          a.norm, 0);
            }
        });
    });
    return Status::ok;
}

// A row of the table, copied to `out` where its elements lie apart.
template <class E>
inline const E* table_row(const EmbedArgs& a, int64_t id, E* out) {
    const E* table = static_cast<const E*>(a.table);
    if (!a.in_panels) return table + id * a.table_stride;
    const E* panel = table + id / kPanel * ((a.width + 1) / 2 * 2 * kPanel);
    for (int64_t i = 0; i < a.width; ++i) out[i] = panel[place_of<E>(id % kPanel, i)];
    return out;
}

template <class E>
inline void embed_row(const EmbedArgs& a, int64_t token) {
    const E* position = nullptr;
    if (a.position_table != nullptr)
        position = static_cast<const E*>(a.position_table) + a.positions[token] * a.position_stride;
    E* out = row_of<E>(a.out, token, 0);
    const E* from = table_row(a, a.ids[token], out);
    const F32 scale = splat(a.scale);
    each(a.width, [&](auto lanes, int64_t i) {
        F32 v = mul(get(lanes, from + i), scale);
        if (position != nullptr) v = add(rounded(E{}, v), get(lanes, position + i));
        put(lanes, out + i, v);
    });
}

bool are_below(const int64_t* ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (static_cast<uint64_t>(ids[i]) >= static_cast<uint64_t>(limit)) return false;
    return true;
}

Status embed(const EmbedArgs& a, int64_t tokens, Pool& pool) {
    if (!are_below(a.ids, tokens, a.table_rows)) return Status::bad_index;
    if (a.position_table != nullptr && !are_below(a.positions, tokens, a.position_rows))
        return Status::bad_index;
    const Reading reading(a.rows);
    EmbedArgs args = a;
    if (reading.is_needed()) {
        args.in_panels = false;
        args.table = a.rows->parts->source;
        args.table_stride = a.width;
    }
    with_type(a.type, [&](auto type) {
        parallel_rows(pool, tokens, a.width, [&](int64_t first, int64_t stop) {
            for (int64_t token = first; token < stop; ++token)
                embed_row<decltype(type)>(args, token);
        });
    });
    return Status::ok;
}

// The sigmoid is rounded before the product.
template <class E>
inline void gate_row(const ScaleGateArgs& a, int64_t token) {
    const E* y = row_of<E>(a.y, token, 0);
    const E* gate = row_of<E>(a.gate, token, 0);
    E* out = row_of<E>(a.out, token, 0);
    if (a.gate_width == 1) {
        const F32 one = rounded(E{}, sigmoid(splat(first(load_part(gate, 1)))));
        each(a.width,
             [&](auto lanes, int64_t i) { put(lanes, out + i, mul(get(lanes, y + i), one)); });
        return;
    }
    each(a.width, [&](auto lanes, int64_t i) {
        const F32 factor = rounded(E{}, sigmoid(get(lanes, gate + i)));
        put(lanes, out + i, mul(get(lanes, y + i), factor));
    });
}

Status scale_gate(const ScaleGateArgs& a, int64_t tokens, Pool& pool) {
    with_type(a.type, [&](auto type) {
        parallel_rows(pool, tokens, a.width, [&](int64_t first, int64_t stop) {
            for (int64_t token = first; token < stop; ++token) gate_row<decltype(type)>(a, token);
        });
    });
    return Status::ok;
}

// Tokens are added in order, so that where a prompt is cut changes nothing.
template <class E>
inline void sum_chunk(const SumChunksArgs& a, int64_t prompt) {
    const int64_t* chunk = a.chunks + prompt * 3;
    const int64_t first = chunk[0], position = chunk[1], count = chunk[2];
    each(a.width, [&](auto lanes, int64_t i) {
        float* spans = a.spans + prompt * a.width + i;
        float* rest = a.rest + prompt * a.width + i;
        F32 whole = get(lanes, spans), open = get(lanes, rest);
        for (int64_t t = 0; t < count; ++t) {
            open = add(open, get(lanes, row_of<E>(a.x, first + t, 0) + i));
            if ((position + t + 1) % a.span != 0) continue;
            whole = add(whole, open);
            open = splat(0);
        }
        put(lanes, spans, whole);
        put(lanes, rest, open);
    });
}

Status sum_chunks(const SumChunksArgs& a, int64_t prompts, Pool& pool) {
    for (int64_t i = 0; i < prompts; ++i) {
        const int64_t *chunk = a.chunks + i * 3, count = chunk[2];
        const bool is_inside = count <= a.tokens && chunk[0] <= a.tokens - count;
        if (chunk[0] < 0 || chunk[1] < 0 || count < 1 || !is_inside) return Status::bad_index;
    }
    with_type(a.type, [&](auto type) {
        parallel(pool, prompts, [&](int64_t i, int) { sum_chunk<decltype(type)>(a, i); });
    });
    return Status::ok;
}

// Sums of segments, `stride` apart.
template <class Lanes>
inline F32 add_neighbours(Lanes lanes, const float* at, int64_t stride, int64_t count) {
    if (count == 1) return get(lanes, at);
    const int64_t half = count / 2;
    return add(add_neighbours(lanes, at, stride, half),
               add_neighbours(lanes, at + half * stride, stride, half));
}

template <class Lanes>
inline F32 add_segments(Lanes lanes, const float* at, int64_t stride, int64_t count) {
    if ((count & (count - 1)) == 0) return add_neighbours(lanes, at, stride, count);
    F32 sum = get(lanes, at);
    for (int64_t i = 1; i < count; ++i) sum = add(sum, get(lanes, at + i * stride));
    return sum;
}

inline int64_t count_of(Whole) { return kLanes; }
inline int64_t count_of(Part part) { return part.n; }

// Of whole numbers, which have one sum in any order.
template <class Lanes>
inline F32 add_segments(Lanes lanes, const uint32_t* at, int64_t stride, int64_t count) {
    float sums[kLanes] = {};
    for (int64_t lane = 0; lane < count_of(lanes); ++lane) {
        uint32_t sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += at[i * stride + lane];
        sums[lane] = static_cast<float>(static_cast<int32_t>(sum));
    }
    return load(sums);
}

template <class E, class Number>
inline void total_row(const LinearTotalArgs& a, int64_t token) {
    const Number* parts = static_cast<const Number*>(a.parts) + token * a.count * a.width;
    const float* values = nullptr;
    if (a.addend.values != nullptr && a.addend.rows[token] >= 0)
        values = a.addend.values + a.addend.rows[token] * a.addend.stride;
    float scale = 1;
    if (a.peaks != nullptr) scale = a.peaks[token] < kTiny ? 0 : a.peaks[token] / 127.0f;
    E* y = static_cast<E*>(a.y) + token * a.width;
    each(a.width, [&](auto lanes, int64_t i) {
        F32 sum = add_segments(lanes, parts + i, a.width, a.count);
        if (a.scales != nullptr) sum = mul(sum, get(lanes, a.scales + i));
        if (a.peaks != nullptr) sum = mul(sum, splat(scale));
        if (a.bias != nullptr) sum = add(sum, get(lanes, a.bias + i));
        if (values != nullptr) sum = add(sum, get(lanes, values + i));
        put(lanes, y + i, sum);
    });
}

Status linear_total(const LinearTotalArgs& a, int64_t tokens, Pool& pool) {
    with_type(a.type, [&](auto type) {
        using E = decltype(type);
        parallel_rows(pool, tokens, a.width, [&](int64_t first, int64_t stop) {
            for (int64_t token = first; token < stop; ++token)
                a.are_whole ? total_row<E, uint32_t>(a, token) : total_row<E, float>(a, token);
        });
    });
    return Status::ok;
}

}  // namespace

void fill_rows(Kernels& table) {
    table.norm = norm;
    table.add = add;
    table.add_norm = add_norm;
    table.embed = embed;
    table.scale_gate = scale_gate;
    table.sum_chunks = sum_chunks;
    table.linear_total = linear_total;
}

}  // namespace quire::QUIRE_LEVEL
