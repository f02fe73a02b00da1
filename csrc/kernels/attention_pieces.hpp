// The work of an attention step in pieces, which any thread may take.
//
// A piece is some tokens of a row, the queries of one KV head, and all keys or, where a row has few
// new tokens, one span of them. Who finishes the last span of such tokens merges all of them, in
// order.
#pragma once

#include "core/parallel.hpp"
#include "kernels/attention_tile.hpp"

namespace quire::QUIRE_LEVEL {

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
struct PieceShape {
    int64_t kv_heads, per_kv;
    int64_t width;  // of merged values: that of values, rounded up
    int64_t tokens_per_piece;
    int64_t span;    // in keys
    int64_t window;  // 0: none

    // Of the pieces of so many new tokens, which are as few and as equal as whole groups of rows
    // allow: one with few tokens would bring keys and values in order for those alone.
    int64_t tokens_of_pieces(int64_t num_new) const {
        const int64_t count = (num_new + tokens_per_piece - 1) / tokens_per_piece;
        const int64_t unit = most(1, kRows / per_kv);
        return least(tokens_per_piece, rounded_up((num_new + count - 1) / count, unit));
    }

    int64_t rows_for(int64_t num_tokens) const { return padded_rows(num_tokens * per_kv); }
    int64_t part_floats(int64_t num_tokens) const {
        return Merged::num_floats(rows_for(num_tokens), width);
    }
    // Of scratch memory that run_piece needs.
    int64_t num_floats(int64_t num_tokens) const {
        return 2 * rows_for(num_tokens) + 2 * part_floats(num_tokens);
    }
};

// The pieces of a step, in memory that all workers see.
struct Pieces {
    Piece* list;
    int64_t count = 0;
    float* parts;
    int32_t* counters;
    int32_t* flaw;  // set where a block id is no block's
};

struct PieceSizes {
    int64_t pieces = 0, floats = 0, counters = 0;
};

// visit(piece) for every piece of the step, those with most keys of a row first.
template <class Visit>
inline PieceSizes cut(const AttentionStep& step, const PieceShape& shape, const Visit& visit) {
    PieceSizes sizes;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int32_t num_new = step.query_start[row + 1] - step.query_start[row];
        if (num_new == 0) continue;
        const int64_t per_piece = shape.tokens_of_pieces(num_new);
        const int64_t computed = step.seq_lens[row] - num_new;
        const bool is_split = num_new <= shape.tokens_per_piece;
        for (int64_t token = (num_new - 1) / per_piece * per_piece; token >= 0;
             token -= per_piece) {
            const int64_t num_tokens = least(per_piece, num_new - token);
            const int64_t p = computed + token;
            const bool is_whole = step.is_whole(row), is_wide = is_whole && step.whole[row] > 1;
            const int64_t near = shape.window > 0 ? most(0, p - shape.window + 1) : 0;
            const int64_t low = is_wide ? least(near, computed) : near;
            const int64_t last = is_whole ? step.seq_lens[row] - 1 : p + num_tokens - 1;
            const int64_t first = low / shape.span;
            const int64_t num_spans = last / shape.span - first + 1;
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

inline Pieces make_pieces(const AttentionStep& step, const PieceShape& shape, Pool& pool) {
    const PieceSizes sizes = cut(step, shape, [](int64_t, const Piece&) {});
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
    cut(step, shape, [&](int64_t index, const Piece& piece) {
        pieces.list[index] = piece;
        if (piece.num_parts == 1) return;
        for (int64_t head = 0; head < shape.kv_heads; ++head)
            pieces.counters[piece.counter + head] = piece.num_parts;
    });
    pieces.count = sizes.pieces;
    return pieces;
}

// Run a piece of one KV head: attend(i, into) leaves span i in `into`; finish(whole) takes the
// result of all keys.
template <class Attend, class Finish>
inline void run_piece(const Pieces& pieces, const Piece& piece, const PieceShape& shape,
                      int64_t head, float* memory, const Attend& attend, const Finish& finish) {
    const int64_t padded = shape.rows_for(piece.num_tokens);
    const auto merged = [&](float* at) { return Merged(at, padded, shape.width); };
    const auto part = [&](const Piece& of) {
        return merged(pieces.parts + of.memory + head * shape.part_floats(of.num_tokens));
    };
    float *keep = memory, *taken = keep + padded;
    if (piece.num_parts == 1) {
        const Merged whole = merged(taken + padded);
        const Merged next = merged(taken + padded + shape.part_floats(piece.num_tokens));
        attend(piece.span, whole);
        for (int64_t i = 1; i < piece.num_spans; ++i) {
            attend(piece.span + i, next);
            merge(whole, next, keep, taken);
        }
        return finish(whole);
    }
    attend(piece.span, part(piece));
    int32_t* counter = pieces.counters + piece.counter + head;
    if (__atomic_sub_fetch(counter, 1, __ATOMIC_ACQ_REL) > 0) return;
    const Merged whole = part(pieces.list[piece.first_part]);
    for (int64_t i = 1; i < piece.num_parts; ++i)
        merge(whole, part(pieces.list[piece.first_part + i]), keep, taken);
    finish(whole);
}

// Whether the rows of a step are within its tokens.
inline bool is_sound(const AttentionStep& step, int64_t tokens) {
    if (step.query_start[0] != 0 || step.query_start[step.num_rows] > tokens) return false;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int32_t num_new = step.query_start[row + 1] - step.query_start[row];
        if (num_new < 0 || num_new > step.seq_lens[row]) return false;
    }
    return true;
}

}  // namespace quire::QUIRE_LEVEL
