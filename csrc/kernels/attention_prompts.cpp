// Attention within prompts that a step has whole: a query also sees what follows it, and keys and
// values are rows of the step's own activations. The arithmetic is that of attention_tile.hpp.
//
// A query's segments begin at its prompt's first token and are merged in order, so that its bits do
// not depend on what else is in the step.

#include "core/parallel.hpp"
#include "kernels/attention_tile.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// The keys and values of one prompt and KV head.
struct PromptKeys {
    const AttendPromptsArgs& a;
    int64_t start;  // the prompt's first token in the step
    int64_t head;

    int64_t dim() const { return a.head_dim; }
    bool has_scales() const { return false; }
};

// `count` keys from token `first` on as a panel [dim, kColumns]; its other columns are arbitrary.
template <class E>
inline void transpose_keys(const PromptKeys& keys, int64_t first, int64_t count, float* k) {
    const int64_t dim = keys.dim(), step = keys.a.k.token_stride;
    const E* key = row_of<E>(keys.a.k, first, keys.head);
    for (int64_t j = 0; j < count; ++j, key += step)
        each(dim, [&](auto lanes, int64_t i) {
            alignas(64) float x[kLanes];
            put(lanes, x, get(lanes, key + i));
            const int64_t width = least(kLanes, dim - i);
            for (int64_t l = 0; l < width; ++l) k[(i + l) * kColumns + j] = x[l];
        });
}

inline void widen(const PromptKeys& keys, int64_t segment, int64_t low, int64_t high,
                  const TileRoom& room) {
    const int64_t dim = keys.dim();
    with_type(keys.a.type, [&](auto type) {
        using E = decltype(type);
        for (int64_t j = low / kColumns * kColumns; j < high; j += kColumns)
            transpose_keys<E>(keys, keys.start + segment + j, least(kColumns, high - j),
                              room.k + j * dim);
        for (int64_t j = low; j < high; ++j) {
            const E* value = row_of<E>(keys.a.v, keys.start + segment + j, keys.head);
            each(dim, [&](auto lanes, int64_t i) {
                store(room.v + i / kColumns * kColumns * kSegment + j * kColumns + i % kColumns,
                      get(lanes, value + i));
            });
        }
    });
}

// Some tokens of a row.
struct PromptPiece {
    int32_t row;
    int32_t token;  // the first, in the row
};

// One piece's queries of one KV head.
struct PromptWorker {
    const AttendPromptsArgs& a;
    int64_t head, per_kv;
    int64_t start, length;  // of the prompt
    int64_t token, rows;    // the first, in the step; queries
    float* memory;

    static int64_t num_floats(const AttendPromptsArgs& a, int64_t tokens) {
        const int64_t per_kv = a.heads / a.kv_heads, rows = tokens * per_kv;
        return rounded_up(per_kv, kLanes) + TileRoom::num_floats(rows, a.head_dim) +
               Merged::num_floats(padded_rows(rows), rounded_up(a.head_dim, kColumns));
    }

    PromptWorker(const AttendPromptsArgs& args, const PromptPiece& piece, int64_t kv_head,
                 int64_t tokens, Pool& pool, int worker)
        : a(args), head(kv_head), per_kv(args.heads / args.kv_heads) {
        start = a.step->query_start[piece.row];
        length = a.step->query_start[piece.row + 1] - start;
        token = start + piece.token;
        const int64_t count = least(tokens, length - piece.token);
        rows = count * per_kv;
        const size_t bytes = num_floats(a, count) * sizeof(float);
        memory = static_cast<float*>(scratch(pool, worker, bytes));
    }

    void run() {
        float* slopes = memory;
        for (int64_t i = 0; i < per_kv; ++i) slopes[i] = 0;
        const int64_t width = rounded_up(a.head_dim, kColumns), padded = padded_rows(rows);
        const Merged whole(slopes + rounded_up(per_kv, kLanes), padded, width);
        whole.clear();
        const TileRoom room(whole.peaks + Merged::num_floats(padded, width), rows, a.head_dim);
        fill_queries(room, rows, a.head_dim, [&](int64_t row, float* to) { load_query(row, to); });
        const int64_t first = token - start;
        const Queries queries{rows, per_kv, first, a.window, slopes, length};
        tile_span(queries, PromptKeys{a, start, head}, Scoring(a.scale, 0), room,
                  queries.low(first), queries.stop(), whole);
        finish(whole);
    }

    void load_query(int64_t row, float* to) const {
        with_type(a.type, [&](auto type) {
            const auto* q =
                row_of<decltype(type)>(a.q, token + row / per_kv, head * per_kv + row % per_kv);
            each(a.head_dim, [&](auto lanes, int64_t i) { put(lanes, to + i, get(lanes, q + i)); });
        });
    }

    void finish(const Merged& whole) const {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t h = head * per_kv + r % per_kv;
            const int64_t at = ((token + r / per_kv) * a.heads + h) * a.head_dim;
            const float* values = whole.values + r * whole.stride;
            const F32 sum = splat(whole.sums[r]);
            with_type(a.type, [&](auto type) {
                auto* out = static_cast<decltype(type)*>(a.out) + at;
                each(a.head_dim, [&](auto lanes, int64_t i) {
                    put(lanes, out + i, div(load(values + i), sum));
                });
            });
        }
    }
};

// visit(index, piece) for every piece of the step; their number.
template <class Visit>
inline int64_t cut(const AttentionStep& step, int64_t tokens, const Visit& visit) {
    int64_t count = 0;
    for (int32_t row = 0; row < step.num_rows; ++row) {
        const int64_t length = step.query_start[row + 1] - step.query_start[row];
        for (int64_t token = 0; token < length; token += tokens)
            visit(count++, PromptPiece{row, static_cast<int32_t>(token)});
    }
    return count;
}

// Whether the rows of a step are whole prompts within its tokens.
inline bool are_whole(const AttentionStep& step, int64_t tokens) {
    if (step.query_start[0] != 0 || step.query_start[step.num_rows] > tokens) return false;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int32_t length = step.query_start[row + 1] - step.query_start[row];
        if (length < 0 || length != step.seq_lens[row]) return false;
    }
    return true;
}

Status attend_prompts(const AttendPromptsArgs& a, int64_t tokens, Pool& pool) {
    const AttentionStep& step = *a.step;
    if (step.num_rows == 0) return Status::ok;
    if (!are_whole(step, tokens)) return Status::bad_index;
    const int64_t per_piece = most(1, kTileRows / (a.heads / a.kv_heads));
    const int64_t count = cut(step, per_piece, [](int64_t, const PromptPiece&) {});
    auto* pieces =
        static_cast<PromptPiece*>(shared_scratch(pool, most(1, count) * sizeof(PromptPiece)));
    cut(step, per_piece, [&](int64_t index, const PromptPiece& piece) { pieces[index] = piece; });
    parallel(pool, count * a.kv_heads, [&](int64_t index, int worker) {
        PromptWorker(a, pieces[index / a.kv_heads], index % a.kv_heads, per_piece, pool, worker)
            .run();
    });
    return Status::ok;
}

}  // namespace

void fill_attention_prompts(Kernels& table) { table.attend_prompts = attend_prompts; }

}  // namespace quire::QUIRE_LEVEL
