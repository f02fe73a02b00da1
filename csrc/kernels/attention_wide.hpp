// Attention in fp32: queries, keys and values are widened.
#pragma once

#include "kernels/attention_tile.hpp"

namespace quire::QUIRE_LEVEL {

// The queries of a piece, for its spans one after the other.
class Wide {
   public:
    // Of scratch memory.
    static int64_t num_floats(int64_t rows, int64_t dim) {
        return most(TileRoom::num_floats(rows, dim), DirectRoom::num_floats(dim));
    }

    Wide(const Queries& queries, const QueryRows& from, const Keys& keys, const Scoring& scoring,
         float* memory)
        : queries_(queries),
          keys_(keys),
          scoring_(scoring),
          memory_(memory),
          is_direct_(queries.rows <= kDirectRows && keys.has_tiles() && keys.dim() % kLanes == 0) {
        const int64_t rows = queries.rows, dim = keys.dim();
        const auto load = [&](int64_t row, float* to) { from.load(keys.type, dim, row, to); };
        if (!is_direct_) {
            fill_queries(tile_room(), rows, dim, load);
            return;
        }
        float* q = direct_room().q;
        for (int64_t i = rows * dim; i < kDirectRows * dim; ++i) q[i] = 0;
        for (int64_t r = 0; r < rows; ++r) load(r, q + r * dim);
    }

    // Keys from..to-1, all of one span, into `span`.
    void attend(int64_t from, int64_t to, const Merged& span) const {
        span.clear();
        if (is_direct_)
            direct_span(queries_, keys_, scoring_, direct_room(), from, to, span);
        else
            tile_span(queries_, keys_, scoring_, tile_room(), from, to, span);
    }

   private:
    DirectRoom direct_room() const { return {memory_, keys_.dim()}; }
    TileRoom tile_room() const { return {memory_, queries_.rows, keys_.dim()}; }

    const Queries& queries_;
    const Keys& keys_;
    const Scoring& scoring_;
    float* memory_;
    bool is_direct_;
};

}  // namespace quire::QUIRE_LEVEL
