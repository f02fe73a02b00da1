// Causal attention over KV memory in blocks; how softmax is put together is in
// attention_softmax.hpp.
//
// The work of a step is cut into pieces: some tokens of a row, the queries of one KV head, and all
// keys or, where a row has few new tokens, one span of them. Who finishes the last span of such
// tokens merges all of them, in order.

#include "kernels/attention_tile.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

struct Piece {
    int32_t row;
    int32_t token;  // the first, in the row's new tokens
    int32_t num_tokens;
    int32_t span, num_spans;
    int32_t num_parts;   // pieces of the same tokens; 1: the result is written at once
    int32_t first_part;  // the index of their first piece
    int64_t memory;      // of the part, in floats, for KV head 0
    int64_t counter;     // of parts to come, for KV head 0
};

// What all pieces have in common.
struct Shape {
    int64_t heads, kv_heads, per_kv, dim;
    int64_t width;  // of merged values: dim rounded up
    int64_t tokens_per_piece;

    explicit Shape(const AttendArgs& a)
        : heads(a.heads),
          kv_heads(a.kv.kv_heads),
          per_kv(heads / kv_heads),
          dim(a.kv.head_dim),
          width(rounded_up(dim, kColumns)),
          tokens_per_piece(most(1, kTileRows / per_kv)) {}

    int64_t rows_for(int64_t num_tokens) const { return padded_rows(num_tokens * per_kv); }
    int64_t part_floats(int64_t num_tokens) const {
        return Merged::num_floats(rows_for(num_tokens), width);
    }
};

// The pieces of a step, in memory that all workers see.
struct Pieces {
    Piece* list;
    int64_t count = 0;
    float* parts;
    int32_t* counters;
    int32_t* flaw;
};

struct Sizes {
    int64_t pieces = 0, floats = 0, counters = 0;
};

// visit(piece) for every piece of the step, those with most keys of a row first.
template <class Visit>
inline Sizes cut(const AttendArgs& a, const Shape& shape, const Visit& visit) {
    const AttentionStep& step = *a.step;
    Sizes sizes;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int32_t num_new = step.query_start[row + 1] - step.query_start[row];
        if (num_new == 0) continue;
        const int64_t per_piece = shape.tokens_per_piece;
        const int64_t computed = step.seq_lens[row] - num_new;
        const bool is_split = num_new <= per_piece;
        for (int64_t token = (num_new - 1) / per_piece * per_piece; token >= 0;
             token -= per_piece) {
            const int64_t num_tokens = least(per_piece, num_new - token);
            const int64_t p = computed + token;
            const int64_t low = a.window > 0 ? most(0, p - a.window + 1) : 0;
            const int64_t first = low / kSpan, num_spans = (p + num_tokens - 1) / kSpan - first + 1;
            const int64_t num_parts = is_split ? num_spans : 1;
            const int64_t floats = num_parts > 1 ? shape.part_floats(num_tokens) : 0;
            const int64_t first_part = sizes.pieces;
            for (int64_t part = 0; part < num_parts; ++part) {
                const int64_t span = num_parts > 1 ? first + part : first;
                visit(sizes.pieces,
                      Piece{static_cast<int32_t>(row), static_cast<int32_t>(token),
                            static_cast<int32_t>(num_tokens), static_cast<int32_t>(span),
                            static_cast<int32_t>(num_parts > 1 ? 1 : num_spans),
                            static_cast<int32_t>(num_parts), static_cast<int32_t>(first_part),
                            sizes.floats, sizes.counters});
                sizes.pieces += 1;
                sizes.floats += floats * shape.kv_heads;
            }
            if (num_parts > 1) sizes.counters += shape.kv_heads;
        }
    }
    return sizes;
}

inline Pieces make_pieces(const AttendArgs& a, const Shape& shape, Pool& pool) {
    const Sizes sizes = cut(a, shape, [](int64_t, const Piece&) {});
    const int64_t list_bytes = rounded_up(sizes.pieces * sizeof(Piece), 64);
    const int64_t part_bytes = rounded_up(sizes.floats * sizeof(float), 64);
    char* memory = static_cast<char*>(
        shared_scratch(pool, list_bytes + part_bytes + (sizes.counters + 1) * sizeof(int32_t)));
    Pieces pieces;
    pieces.list = reinterpret_cast<Piece*>(memory);
    pieces.parts = reinterpret_cast<float*>(memory + list_bytes);
    pieces.flaw = reinterpret_cast<int32_t*>(memory + list_bytes + part_bytes);
    pieces.counters = pieces.flaw + 1;
    *pieces.flaw = 0;
    cut(a, shape, [&](int64_t index, const Piece& piece) {
        pieces.list[index] = piece;
        if (piece.num_parts == 1) return;
        for (int64_t head = 0; head < shape.kv_heads; ++head)
            pieces.counters[piece.counter + head] = piece.num_parts;
    });
    pieces.count = sizes.pieces;
    return pieces;
}

// Value `head` of what there is per head, for powers of 2, or `none`.
inline float at_head(const PerHead& values, int64_t head, float none) {
    if (values.data == nullptr) return none;
    const float value = with_type(values.type, [&](auto type) {
        return first(load_part(static_cast<const decltype(type)*>(values.data) + head, 1));
    });
    return static_cast<float>(value * kLog2e);
}

// One piece's queries of one KV head.
struct Worker {
    const AttendArgs& a;
    const Shape& shape;
    const Pieces& pieces;
    const Piece& piece;
    int64_t head;   // KV head
    int64_t token;  // the piece's first, in the step
    int64_t rows;
    float* memory;
    float* slopes;

    // Floats of scratch memory for a piece of so many tokens.
    static int64_t num_floats(const Shape& shape, int64_t num_tokens) {
        const int64_t rows = num_tokens * shape.per_kv;
        return rounded_up(shape.per_kv, kLanes) + 2 * shape.rows_for(num_tokens) +
               2 * shape.part_floats(num_tokens) +
               most(TileRoom::num_floats(rows, shape.dim), DirectRoom::num_floats(shape.dim));
    }

    Worker(const AttendArgs& args, const Shape& common, const Pieces& all, int64_t index,
           Pool& pool, int worker)
        : a(args),
          shape(common),
          pieces(all),
          piece(all.list[index / common.kv_heads]),
          head(index % common.kv_heads) {
        token = a.step->query_start[piece.row] + piece.token;
        rows = piece.num_tokens * shape.per_kv;
        const size_t bytes = num_floats(shape, piece.num_tokens) * sizeof(float);
        slopes = static_cast<float*>(scratch(pool, worker, bytes));
        memory = slopes + rounded_up(shape.per_kv, kLanes);
        for (int64_t i = 0; i < shape.per_kv; ++i)
            slopes[i] = at_head(a.alibi, head * shape.per_kv + i, 0);
    }

    float* take(int64_t floats) {
        float* taken = memory;
        memory += floats;
        return taken;
    }
    Merged merged(float* at) const {
        return Merged(at, shape.rows_for(piece.num_tokens), shape.width);
    }
    float* part(const Piece& of) const {
        return pieces.parts + of.memory + head * shape.part_floats(of.num_tokens);
    }
    // A row's query in fp32, in `to` [D].
    void load_query(int64_t row, float* to) const {
        const int64_t t = token + row / shape.per_kv;
        const int64_t h = head * shape.per_kv + row % shape.per_kv;
        with_type(a.type, [&](auto type) {
            const auto* q = row_of<decltype(type)>(a.q, t, h);
            each(shape.dim, [&](auto lanes, int64_t i) { put(lanes, to + i, get(lanes, q + i)); });
        });
    }

    void run() {
        const int64_t padded = shape.rows_for(piece.num_tokens);
        float *keep = take(padded), *taken = take(padded);
        const int64_t floats = shape.part_floats(piece.num_tokens);
        const Merged whole = merged(take(floats));
        whole.clear();
        if (piece.num_parts == 1) {
            attend_spans(merged(take(floats)),
                         [&](const Merged& span) { merge(whole, span, keep, taken); });
            return finish(whole);
        }
        attend_spans(merged(part(piece)), [](const Merged&) {});
        int32_t* counter = pieces.counters + piece.counter + head;
        if (__atomic_sub_fetch(counter, 1, __ATOMIC_ACQ_REL) > 0) return;
        for (int64_t i = 0; i < piece.num_parts; ++i)
            merge(whole, merged(part(pieces.list[piece.first_part + i])), keep, taken);
        finish(whole);
    }

    // done(span) for each of the piece's spans in order.
    template <class Done>
    void attend_spans(const Merged& span, const Done& done) {
        const int32_t* blocks = a.step->table + a.step->table_row[piece.row] * a.step->table_stride;
        const Keys keys{a.type, a.kv, blocks, head, pieces.flaw};
        const int64_t num_new = a.step->query_start[piece.row + 1] - a.step->query_start[piece.row];
        const int64_t first = a.step->seq_lens[piece.row] - num_new + piece.token;
        const Queries queries{rows, shape.per_kv, first, a.window, slopes};
        const Scoring scoring(a.scale, a.softcap);
        const bool is_direct = rows <= kDirectRows && keys.has_tiles() && shape.dim % kLanes == 0;
        const auto all = [&](const auto& room, const auto& attend_span) {
            for (int64_t i = piece.span; i < piece.span + piece.num_spans; ++i) {
                span.clear();
                attend_span(queries, keys, scoring, room, most(i * kSpan, queries.low(first)),
                            least((i + 1) * kSpan, queries.stop()), span);
                done(span);
            }
        };
        if (is_direct)
            all(direct_room(), direct_span);
        else
            all(tile_room(), tile_span);
    }

    DirectRoom direct_room() {
        const DirectRoom room(take(DirectRoom::num_floats(shape.dim)), shape.dim);
        for (int64_t i = rows * shape.dim; i < kDirectRows * shape.dim; ++i) room.q[i] = 0;
        for (int64_t r = 0; r < rows; ++r) load_query(r, room.q + r * shape.dim);
        return room;
    }

    // q in groups of kRows: [dim, kRows] each.
    TileRoom tile_room() {
        const TileRoom room(take(TileRoom::num_floats(rows, shape.dim)), rows, shape.dim);
        for (int64_t i = rows / kRows * kRows * shape.dim; room.q + i < room.s; ++i) room.q[i] = 0;
        for (int64_t r = 0; r < rows; ++r) {
            float* to = room.q + r / kRows * kRows * shape.dim + r % kRows;
            load_query(r, room.k);  // keys come there later
            for (int64_t i = 0; i < shape.dim; ++i) to[i * kRows] = room.k[i];
        }
        return room;
    }

    // The result from all keys, with the sinks.
    void finish(const Merged& whole) {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t h = head * shape.per_kv + r % shape.per_kv;
            const float sink = at_head(a.sinks, h, kNothing);
            const F32 old = splat(whole.peaks[r]), next = splat(sink);
            const F32 peak = max(max(old, next), splat(-3e38f));
            const F32 keep = exp2(sub(old, peak)), extra = exp2(sub(next, peak));
            const F32 sum = fma(splat(whole.sums[r]), keep, extra);
            const int64_t at = ((token + r / shape.per_kv) * shape.heads + h) * shape.dim;
            const float* values = whole.values + r * whole.stride;
            with_type(a.type, [&](auto type) {
                auto* out = static_cast<decltype(type)*>(a.out) + at;
                each(shape.dim, [&](auto lanes, int64_t i) {
                    put(lanes, out + i, div(mul(load(values + i), keep), sum));
                });
            });
        }
    }
};

bool is_sound(const AttentionStep& step, int64_t tokens) {
    if (step.query_start[0] != 0 || step.query_start[step.num_rows] > tokens) return false;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int32_t num_new = step.query_start[row + 1] - step.query_start[row];
        if (num_new < 0 || num_new > step.seq_lens[row]) return false;
    }
    return true;
}

Status attend(const AttendArgs& a, int64_t tokens, Pool& pool) {
    if (a.step->num_rows == 0) return Status::ok;
    if (!is_sound(*a.step, tokens)) return Status::bad_index;
    const Shape shape(a);
    const Pieces pieces = make_pieces(a, shape, pool);
    parallel(pool, pieces.count * shape.kv_heads, [&](int64_t index, int worker) {
        Worker(a, shape, pieces, index, pool, worker).run();
    });
    return *pieces.flaw ? Status::bad_index : Status::ok;
}

}  // namespace

void fill_attention(Kernels& table) { table.attend = attend; }

}  // namespace quire::QUIRE_LEVEL
