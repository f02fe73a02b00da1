// Attention within prompts that a step has whole: a query also sees what follows it, and keys and
// values are rows of the step's own activations. The arithmetic is that of attention_tile.hpp.
//
// A query's segments begin at its prompt's first token and are merged in order, so that its bits do
// not depend on what else is in the step. Prompts of few tokens that all see each other need no
// merging: there the vectors are of queries, so that softmax goes down their columns.

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

// A head's rows are thousands of bytes apart, which no prefetcher of a processor follows.
constexpr int64_t kAhead = kLanes;

template <class E>
inline void fetch_ahead(const E* row, int64_t step, int64_t dim) {
    constexpr int64_t kLine = 64 / sizeof(E);
    for (int64_t i = 0; i < dim; i += kLine) fetch_early(row + kAhead * step + i);
}

// `count` keys from token `first` on as a panel [dim, kColumns]; its other columns are arbitrary.
template <class E>
inline void transpose_keys(const PromptKeys& keys, int64_t first, int64_t count, float* k) {
    const int64_t dim = keys.dim(), step = keys.a.k.token_stride;
    const E* key = row_of<E>(keys.a.k, first, keys.head);
    for (int64_t j = 0; j < count; j += kLanes, key += kLanes * step) {
        const int64_t some = least(kLanes, count - j);
        for (int64_t r = 0; r < some; ++r) fetch_ahead(key + r * step, step, dim);
        each(dim, [&](auto lanes, int64_t i) {
            F32 block[kLanes];
            for (int64_t r = 0; r < kLanes; ++r)
                block[r] = r < some ? get(lanes, key + r * step + i) : splat(0);
            transpose(block);
            const int64_t width = least(kLanes, dim - i);
            for (int64_t l = 0; l < width; ++l) store(k + (i + l) * kColumns + j, block[l]);
        });
    }
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
            fetch_ahead(value, keys.a.v.token_stride, dim);
            each(dim, [&](auto lanes, int64_t i) {
                store(room.v + i / kColumns * kColumns * kSegment + j * kColumns + i % kColumns,
                      get(lanes, value + i));
            });
        }
    });
}

inline bool can_share_values(const Queries&, const PromptKeys&, int64_t, int64_t, int64_t) {
    return true;  // a prompt's bits are those of the whole prompt
}

// A piece's queries share what is made of all keys and values, so that there are more of them than
// in a tile of a step that has few.
constexpr int64_t kPieceRows = 2 * kTileRows;

constexpr int64_t kFewKeys = 512;  // their scores with a vector of queries stay in the second cache
constexpr int64_t kPitch = 144;  // between keys: no power of two, so that they spread in the cache
constexpr int64_t kPitchDim = 128;

// Whether all tokens of a prompt of this length see each other, and are few.
inline bool are_few(const AttendPromptsArgs& a, int64_t length) {
    return length <= kFewKeys && a.head_dim <= kPitchDim && (a.window == 0 || a.window >= length);
}

// Scratch memory for kColumns queries of a prompt of few tokens, in floats.
struct FewRoom {
    float *q, *k, *v, *s, *out, *inverse;
    int64_t width, length;

    static int64_t num_floats(int64_t dim, int64_t length) {
        const int64_t width = rounded_up(dim, kColumns), padded = length + kRows;
        return width * kColumns + padded * (kPitch + kColumns) + length * width +
               (kRows + kColumns) * (width + 1);
    }
    FewRoom(float* memory, int64_t dim, int64_t num_keys)
        : q(memory), width(rounded_up(dim, kColumns)), length(num_keys) {
        const int64_t padded = num_keys + kRows;
        k = q + width * kColumns;
        v = k + padded * kPitch;
        s = v + num_keys * width;
        out = s + padded * kColumns;
        inverse = out + (kRows + kColumns) * width;
    }
    float* panel(int64_t column) const { return v + column / kColumns * kColumns * length; }
};

// Scores [keys, kColumns] to weights whose sum is 1 / inverse.
inline void soften_columns(const Scoring& scoring, const FewRoom& room) {
    for (int64_t c = 0; c < kColumns; c += kLanes) {
        float* s = room.s + c;
        F32 top = splat(kNothing), sum = splat(0);
        for (int64_t t = 0; t < room.length; ++t) {
            const F32 score = scoring(load(s + t * kColumns));
            store(s + t * kColumns, score);
            top = max(top, score);
        }
        for (int64_t t = 0; t < room.length; ++t) {
            const F32 weight = exp2(sub(load(s + t * kColumns), top));
            store(s + t * kColumns, weight);
            sum = add(sum, weight);
        }
        store(room.inverse + c, div(splat(1), sum));
    }
}

// The sums for n of the queries, at room.out [n, width].
inline void weigh_columns(const FewRoom& room, int64_t n) {
    for (int64_t i = 0; i < room.width; i += kColumns) {
        for (int64_t row = 0; row < n; row += kRows) {
            with_group(least(kRows, n - row), [&](auto count) {
                small_product<count.value, 1, kColumns>(
                    room.s + row, room.panel(i), room.length, [&](int r, int c, F32 sum) {
                        const F32 inverse = splat(room.inverse[row + r]);
                        store(room.out + (row + r) * room.width + i + c * kLanes,
                              mul(sum, inverse));
                    });
            });
        }
    }
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
        const int64_t floats =
            are_few(a, length) ? FewRoom::num_floats(a.head_dim, length) : num_floats(a, count);
        memory = static_cast<float*>(scratch(pool, worker, floats * sizeof(float)));
    }

    void run() {
        with_type(a.type, [&](auto type) {
            if (are_few(a, length))
                attend_few<decltype(type)>();
            else
                attend_many();
        });
    }

    template <class E>
    void attend_few() {
        const FewRoom room(memory, a.head_dim, length);
        for (int64_t j = 0; j < length; ++j) {
            const E* key = row_of<E>(a.k, start + j, head);
            const E* value = row_of<E>(a.v, start + j, head);
            fetch_ahead(key, a.k.token_stride, a.head_dim);
            fetch_ahead(value, a.v.token_stride, a.head_dim);
            each(a.head_dim, [&](auto lanes, int64_t i) {
                store(room.k + j * kPitch + i, get(lanes, key + i));
                store(room.panel(i) + j * kColumns + i % kColumns, get(lanes, value + i));
            });
        }
        const Scoring scoring(a.scale, 0);
        for (int64_t row = 0; row < rows; row += kColumns) {
            const int64_t n = least(kColumns, rows - row);
            transpose_queries<E>(row, room.q);
            for (int64_t j = 0; j < length; j += kRows)
                with_group(least(kRows, length - j), [&](auto count) {
                    small_product<count.value, kPitch, 1>(
                        room.k + j * kPitch, room.q, a.head_dim, [&](int r, int c, F32 sum) {
                            store(room.s + (j + r) * kColumns + c * kLanes, sum);
                        });
                });
            soften_columns(scoring, room);
            weigh_columns(room, n);
            for (int64_t r = 0; r < n; ++r) {
                E* out = static_cast<E*>(a.out) + place(row + r);
                each(a.head_dim, [&](auto lanes, int64_t i) {
                    put(lanes, out + i, load(room.out + r * room.width + i));
                });
            }
        }
    }

    // kColumns queries from `row` on, as [dim, kColumns]; those beyond the last are 0.
    template <class E>
    void transpose_queries(int64_t row, float* to) const {
        for (int64_t c = 0; c < kColumns; c += kLanes) {
            each(a.head_dim, [&](auto lanes, int64_t i) {
                F32 block[kLanes];
                for (int64_t l = 0; l < kLanes; ++l)
                    block[l] =
                        row + c + l < rows ? get(lanes, query<E>(row + c + l) + i) : splat(0);
                transpose(block);
                for (int64_t l = 0; l < kLanes; ++l) store(to + (i + l) * kColumns + c, block[l]);
            });
        }
    }

    template <class E>
    const E* query(int64_t row) const {
        return row_of<E>(a.q, token + row / per_kv, head * per_kv + row % per_kv);
    }

    // Where a row's result is.
    int64_t place(int64_t row) const {
        const int64_t h = head * per_kv + row % per_kv;
        return ((token + row / per_kv) * a.heads + h) * a.head_dim;
    }

    void attend_many() {
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
            const int64_t at = place(r);
            const float* values = whole.values + r * whole.stride;
            const F32 sum = splat(whole.sums[r]);
            with_type(a.type, [&](auto type) {
                auto* out = static_cast<decltype(type)*>(a.out) + at;
                each(a.head_dim, [&](auto lanes, int64_t i) {
                    put(lanes, out + i, div(add(load(values + i), splat(0)), sum));
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
    const int64_t per_piece = most(1, kPieceRows / (a.heads / a.kv_heads));
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
