// Latent attention in its absorbed form; see ops/mixers/latent.py, and latent_tile.hpp for the
// arithmetic. How softmax is put together is in attention_softmax.hpp.

#include "kernels/latent_tile.hpp"
#include "kernels/norm.hpp"
#include "kernels/rotate.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// A token's row in scratch memory: the latent and its key, one head's query, cosines and sines.
template <class E>
inline void store_latent(const LatentStoreArgs& a, int64_t token, E* row) {
    const int64_t rank = a.latents.rank, rotated = a.latents.rotated, width = rank + rotated;
    const E* x = row_of<E>(a.x, token, 0);
    norm_row_of<E>(a.norm.kind)(x, row, rank, a.norm, 0);
    __builtin_memcpy(row + rank, x + rank, rotated * sizeof(E));
    E* out = static_cast<E*>(a.out) + token * a.heads * rotated;
    for (int64_t h = 0; h < a.heads; ++h)
        __builtin_memcpy(out + h * rotated, row_of<E>(a.q, token, h), rotated * sizeof(E));
    if (a.cos_sin != nullptr) {
        const Angles<E> angles(a.cos_sin + a.positions[token] * rotated, rotated, a.is_interleaved,
                               row + width);
        angles.rotate(row + rank);
        for (int64_t h = 0; h < a.heads; ++h) angles.rotate(out + h * rotated);
    }
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    char* block = a.latents.data + slot / a.latents.block_size * a.latents.block_bytes;
    E* to = reinterpret_cast<E*>(block) + slot % a.latents.block_size * width;
    __builtin_memcpy(to, row, width * sizeof(E));
}

bool are_in_range(const LatentStoreArgs& a, int64_t tokens) {
    const int64_t num_slots = a.latents.num_blocks * a.latents.block_size;
    for (int64_t i = 0; i < tokens; ++i) {
        if (a.slots[i] < -1 || a.slots[i] >= num_slots) return false;
        const bool is_known = a.positions[i] >= 0 && a.positions[i] < a.num_positions;
        if (a.cos_sin != nullptr && !is_known) return false;
    }
    return true;
}

constexpr int64_t kPerTile = 4;  // tokens

Status latent_store(const LatentStoreArgs& a, int64_t tokens, Pool& pool) {
    if (!are_in_range(a, tokens)) return Status::bad_index;
    const int64_t width = a.latents.rank + 2 * a.latents.rotated;
    with_type(a.type, [&](auto type) {
        using E = decltype(type);
        parallel(pool, (tokens + kPerTile - 1) / kPerTile, [&](int64_t tile, int worker) {
            E* row = static_cast<E*>(scratch(pool, worker, width * sizeof(E)));
            const int64_t stop = least((tile + 1) * kPerTile, tokens);
            for (int64_t token = tile * kPerTile; token < stop; ++token)
                store_latent(a, token, row);
        });
    });
    return Status::ok;
}

// The queries of a piece.
struct LatentWorker {
    const LatentAttendArgs& a;
    const PieceShape& shape;
    const Pieces& pieces;
    const Piece& piece;
    int64_t token;  // the piece's first, in the step
    int64_t rows;
    float* memory;

    LatentWorker(const LatentAttendArgs& args, const PieceShape& common, const Pieces& all,
                 int64_t index, Pool& pool, int worker)
        : a(args), shape(common), pieces(all), piece(all.list[index]) {
        token = a.step->query_start[piece.row] + piece.token;
        rows = piece.num_tokens * a.heads;
        const int64_t room = LatentRoom::num_floats(rows, a.latents.rank + a.latents.rotated);
        const int64_t floats = shape.num_floats(piece.num_tokens) + room;
        memory = static_cast<float*>(scratch(pool, worker, floats * sizeof(float)));
    }

    void run() {
        const int32_t* blocks = a.step->table + a.step->table_row[piece.row] * a.step->table_stride;
        const Latents latents{a.type, a.latents, blocks, pieces.flaw};
        const int64_t num_new = a.step->query_start[piece.row + 1] - a.step->query_start[piece.row];
        const int64_t first = a.step->seq_lens[piece.row] - num_new + piece.token;
        const LatentRoom room(memory + shape.num_floats(piece.num_tokens), rows, latents.width());
        load_queries(room);
        const Scoring scoring(a.scale, 0);
        run_piece(
            pieces, piece, shape, 0, memory,
            [&](int64_t i, const Merged& span) {
                span.clear();
                latent_span(latents, scoring, room, rows, a.heads, first, i * kLatentSpan,
                            least((i + 1) * kLatentSpan, first + piece.num_tokens), span);
            },
            [&](const Merged& whole) { finish(whole); });
    }

    void load_queries(const LatentRoom& room) const {
        const int64_t rank = a.latents.rank, rotated = a.latents.rotated;
        with_type(a.type, [&](auto type) {
            using E = decltype(type);
            const auto scatter = [&](const E* from, int64_t count, float* to) {
                each(count, [&](auto lanes, int64_t i) {
                    float numbers[kLanes];
                    store(numbers, get(lanes, from + i));
                    const int64_t stop = least(kLanes, count - i);
                    for (int64_t j = 0; j < stop; ++j) to[(i + j) * kLanes] = numbers[j];
                });
            };
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t t = token + r / a.heads, h = r % a.heads;
                float* to = room.query(r, rank + rotated);
                scatter(row_of<E>(a.q, t, h), rank, to);
                scatter(row_of<E>(a.q_rotated, t, h), rotated, to + rank * kLanes);
            }
        });
    }

    void finish(const Merged& whole) const {
        const int64_t rank = a.latents.rank;
        with_type(a.type, [&](auto type) {
            for (int64_t r = 0; r < rows; ++r) {
                auto* out = static_cast<decltype(type)*>(a.out) + (token * a.heads + r) * rank;
                const float* values = whole.values + r * whole.stride;
                const F32 sum = splat(whole.sums[r]);
                each(rank, [&](auto lanes, int64_t i) {
                    put(lanes, out + i, div(add(load(values + i), splat(0)), sum));
                });
            }
        });
    }
};

Status latent_attend(const LatentAttendArgs& a, int64_t tokens, Pool& pool) {
    if (a.step->num_rows == 0) return Status::ok;
    if (!is_sound(*a.step, tokens)) return Status::bad_index;
    const int64_t width = rounded_up(a.latents.rank, kColumns);
    const PieceShape shape{1, a.heads, width, most(1, kLatentRows / a.heads), kLatentSpan, 0};
    const Pieces pieces = make_pieces(*a.step, shape, pool);
    parallel(pool, pieces.count, [&](int64_t index, int worker) {
        LatentWorker(a, shape, pieces, index, pool, worker).run();
    });
    return *pieces.flaw ? Status::bad_index : Status::ok;
}

}  // namespace

void fill_latent(Kernels& table) {
    table.latent_store = latent_store;
    table.latent_attend = latent_attend;
}

}  // namespace quire::QUIRE_LEVEL
