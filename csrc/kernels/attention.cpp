// Causal attention over KV memory in blocks: one definition for prompts, decodes and drafts. How
// softmax is put together is in attention_softmax.hpp, how work is cut in attention_pieces.hpp; the
// ways to multiply are in attention_wide.hpp, attention_pairs.hpp and attention_digits.hpp.

#include "kernels/attention_digits.hpp"
#include "kernels/attention_pairs.hpp"
#include "kernels/attention_pieces.hpp"
#include "kernels/attention_wide.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// What all pieces have in common.
struct Shape : PieceShape {
    int64_t heads, dim;

    explicit Shape(const AttendArgs& a)
        : PieceShape{a.kv.kv_heads,
                     a.heads / a.kv.kv_heads,
                     rounded_up(a.kv.head_dim, kColumns),
                     most(1, kTileRows / (a.heads / a.kv.kv_heads)),
                     kSpan,
                     a.window},
          heads(a.heads),
          dim(a.kv.head_dim) {}
};

// Value `head` of what there is per head, for powers of 2, or `none`.
inline float at_head(const PerHead& values, int64_t head, float none) {
    if (values.data == nullptr) return none;
    const float value = with_type(values.type, [&](auto type) {
        return first(load_part(static_cast<const decltype(type)*>(values.data) + head, 1));
    });
    return static_cast<float>(value * kLog2e);
}

// One piece's queries of one KV head, with the arithmetic of a Way.
template <class Way>
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
        return rounded_up(shape.per_kv, kLanes) + shape.num_floats(num_tokens) +
               Way::num_floats(rows, shape.dim);
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

    void run() {
        float* merging = take(shape.num_floats(piece.num_tokens));
        const int32_t* blocks = a.step->table + a.step->table_row[piece.row] * a.step->table_stride;
        const Keys keys{a.type, a.kv, blocks, head, pieces.flaw};
        const int64_t num_new = a.step->query_start[piece.row + 1] - a.step->query_start[piece.row];
        const int64_t first = a.step->seq_lens[piece.row] - num_new + piece.token;
        Queries queries{rows, shape.per_kv, first, a.window, slopes};
        if (a.step->is_whole(piece.row)) {
            queries.whole_stop = a.step->seq_lens[piece.row];
            queries.whole_start = queries.whole_stop - (a.step->whole[piece.row] > 1 ? num_new : 0);
        }
        const QueryRows from{a.q, token, head * shape.per_kv, shape.per_kv};
        const Scoring scoring(a.scale, a.softcap);
        const Way way(queries, from, keys, scoring, take(Way::num_floats(rows, shape.dim)));
        run_piece(
            pieces, piece, shape, head, merging,
            [&](int64_t i, const Merged& span) {
                way.attend(most(i * kSpan, queries.low(first)),
                           least((i + 1) * kSpan, queries.stop()), span);
            },
            [&](const Merged& whole) { finish(whole); });
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
                    put(lanes, out + i, div(add(mul(load(values + i), keep), splat(0)), sum));
                });
            });
        }
    }
};

template <class Way>
Status attend(const AttendArgs& a, int64_t tokens, Pool& pool) {
    if (a.step->num_rows == 0) return Status::ok;
    if (!is_sound(*a.step, tokens)) return Status::bad_index;
    const Shape shape(a);
    const Pieces pieces = make_pieces(*a.step, shape, pool);
    parallel(pool, pieces.count * shape.kv_heads, [&](int64_t index, int worker) {
        Worker<Way>(a, shape, pieces, index, pool, worker).run();
    });
    return *pieces.flaw ? Status::bad_index : Status::ok;
}

}  // namespace

// A level that has an instruction for pairs of bfloat16 has nothing new for other types.
void fill_attention(Kernels& table) {
#if defined(QUIRE_BF16_DOTS)
    table.attend[static_cast<int>(Type::bf16)] = attend<Grouped<Pairs, Keys>>;
#if defined(__AVX512VNNI__)
    table.attend_bytes[static_cast<int>(Type::bf16)] = attend<Grouped<Digits, Keys>>;
#endif
#else
    for (int type = 0; type < kNumTypes; ++type)
        table.attend[type] = table.attend_bytes[type] = attend<Wide>;
#endif
}

}  // namespace quire::QUIRE_LEVEL
