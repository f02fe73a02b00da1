// What all matrix products share: tiles over the lanes of the output, and what happens to a sum.
//
// A weight is cut into panels of kPanel output lanes. A tile multiplies all rows of a chunk with a
// few panels, so that a panel is read from memory once per chunk, and leaves fp32 sums that are
// finished (bias, activation, gate, rounding) while they are in the cache.
#pragma once

#include "core/parallel.hpp"
#include "kernels/element.hpp"
#include "kernels/finish.hpp"
#include "kernels/pairs.hpp"
#include "kernels/tiles.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kChunk = 240;  // the most rows, whose sums stay in the second-level cache
// Of all rows' inputs as they are multiplied, which stay there from one panel to the next.
constexpr int64_t kChunkBytes = 768 * 1024;
// Work of a tile, in multiplications: some microseconds, however it is limited.
constexpr int64_t kTileWork = 131072;

// Sums of a tile: of `panels` panels that are multiplied side by side, kPanel apart, for `rows`
// rows, `stride` apart; and as much memory again for each other segment, room() floats further on.
struct TileSums {
    float* data;
    int64_t panels, rows, stride;

    int64_t room() const { return stride * rows; }
    TileSums at(int64_t offset) const { return {data + offset, panels, rows, stride}; }
};

// The sums of one segment. The number of panels becomes a constant.
template <class Product>
inline void multiply_segment(const Product& product, int64_t panel, int64_t segment,
                             const TileSums& sums) {
    if constexpr (Product::kMostPanels == 4) {
        if (sums.panels == 4) {
            product.template multiply<4>(panel, segment, sums.data, sums.stride);
            return;
        }
        if (sums.panels == 2) {
            product.template multiply<2>(panel, segment, sums.data, sums.stride);
            return;
        }
    }
    product.template multiply<1>(panel, segment, sums.data, sums.stride);
}

// Of all segments, those of neighbours added first. `is_partial`: they are a part of a sum.
template <class Product>
inline void multiply_panels(const Product& product, int64_t panel, const TileSums& sums,
                            bool is_partial) {
    const int64_t segments = product.segments(), room = sums.room();
    for (int64_t s = 0; s < segments; ++s) multiply_segment(product, panel, s, sums.at(s * room));
    if (segments == 1) return;
    for (int64_t row = 0; row < sums.rows; ++row) {
        float* first = sums.data + row * sums.stride;
        for (float* at = first; at < first + sums.panels * kPanel; at += kLanes) {
            const auto both = [&](float* one) { return add(load(one), load(one + room)); };
            const F32 sum = segments == 2 ? both(at) : add(both(at), both(at + 2 * room));
            store(at, is_partial ? sum : product.concluded(row, sum));
        }
    }
}

// Partial sums, as they are, into y, from the lane on; `width` lanes or as many as there are.
inline void store_partial(const LinearArgs& a, int64_t first, int64_t lane, int64_t width,
                          const TileSums& sums) {
    const int64_t left = a.weight.out - lane;
    for (int64_t r = 0; r < sums.rows; ++r)
        __builtin_memcpy(row_of<float>(a.y, first + r, 0) + lane, sums.data + r * sums.stride,
                         sizeof(float) * (left < width ? left : width));
}

// How many panels are multiplied side by side: for few rows as many streams as the memory likes,
// but each thread is to have some tiles. A weight that is streamed is read from its beginning to
// its end, all segments of a panel first, because each jump to another place takes time.
template <class Product>
inline int64_t side_by_side(const LinearArgs& a, int64_t rows, int64_t panels, int threads) {
    if (rows > kFewRows || a.weight.is_streamed) return 1;
    constexpr int64_t kMost = Product::kMostPanels;
    const int64_t most = rows == 1 && kPanelsOfOneRow < kMost ? kPanelsOfOneRow : kMost;
    const int64_t fitting = panels >= 32 * threads ? 4 : panels >= 16 * threads ? 2 : 1;
    return fitting < most ? fitting : most;
}

// A chunk of a product's rows and the tiles that it is cut into, for a kind of weight:
// `Product(a, rows, memory)` has `prepare(row, token)`, which brings a token's x into the form it
// wants as a row, in memory of `num_bytes(a, rows)`; then `multiply<P>(panel, segment, sums,
// stride)`, which leaves the sums of P panels, kPanel apart, for all rows and one of its
// segments(), and reads up to `kMostPanels` at once; and `concluded(row, sum)`, which makes the
// whole sum of those of several segments. That of one is whole as it is, and partial sums are not
// concluded.
//
// Tiles are of groups: of a panel, or of one of each half of a gated weight.
template <class Product>
struct Chunk {
    const LinearArgs& a;
    int64_t first, rows;  // tokens
    Product product;
    int64_t per_group, groups;           // panels of a group, groups of the weight
    int64_t beside, together, per_tile;  // panels side by side, groups at a time, groups of a tile

    // num_products: of this shape, that are computed at once.
    Chunk(const LinearArgs& args, int64_t first_row, int64_t num_rows, void* memory, Pool& pool,
          int64_t num_products = 1)
        : a(args), first(first_row), rows(num_rows), product(a, num_rows, memory) {
        const int64_t panels = num_panels(a.weight);
        per_group = a.weight.is_gated ? 2 : 1;
        groups = panels / per_group;
        beside = side_by_side<Product>(a, rows, panels * num_products, num_threads(pool));
        together = beside > per_group ? beside / per_group : 1;
        const int64_t work = a.weight.in * kPanel * per_group * (rows + 3) / 4;
        const int64_t at_once = work < kTileWork ? kTileWork / (work + !work) : 1;
        per_tile = (at_once + together - 1) / together * together;
    }

    int64_t num_tiles() const { return (groups + per_tile - 1) / per_tile; }

    // A function of its own, or what computes one product and what computes several would each have
    // a copy.
    __attribute__((noinline)) void multiply_tile(int64_t tile, Pool& pool, int worker) const {
        const bool is_partial = a.finish.kind == FinishKind::partial;
        const size_t num_bytes =
            sizeof(float) * kPanel * per_group * together * rows * product.segments();
        auto* memory = static_cast<float*>(scratch(pool, worker, num_bytes));
        const int64_t end = (tile + 1) * per_tile, stop = end < groups ? end : groups;
        for (int64_t g = tile * per_tile, count; g < stop; g += count) {
            count = g + together <= stop ? together : 1;
            const int64_t panels = count * per_group, stride = panels * kPanel;
            const TileSums sums{memory, beside < panels ? beside : panels, rows, stride};
            if (a.lora.factors != nullptr)
                for (int64_t j = 0; j < count; ++j)
                    QUIRE_VECTORS::prefetch_rows(a, first, rows, (g + j) * kPanel);
            for (int64_t i = 0; i < panels; i += sums.panels)
                multiply_panels(product, g * per_group + i, sums.at(i * kPanel), is_partial);
            if (is_partial) {
                store_partial(a, first, g * kPanel, stride, sums);
                continue;
            }
            for (int64_t j = 0; j < count; ++j)
                QUIRE_VECTORS::finish_rows(a, first, rows, (g + j) * kPanel,
                                           memory + j * per_group * kPanel, stride);
        }
    }
};

// Rows that are multiplied with each panel while it is read: whole register blocks, and at least so
// many that reading weights again takes less time than multiplying. All chunks of some tokens are
// about as long, so that none has so few rows that they wait for the memory.
template <class Product>
inline int64_t chunk_rows(const LinearArgs& a, int64_t tokens) {
    constexpr int64_t kLeast = 4 * kRowBlock;
    const int64_t bytes = Product::num_bytes(a, 1);
    const int64_t fitting = kChunkBytes / (bytes + !bytes) / kRowBlock * kRowBlock;
    const int64_t most = fitting < kLeast ? kLeast : fitting < kChunk ? fitting : kChunk;
    const int64_t chunks = (tokens + most - 1) / most;
    const int64_t blocks = (tokens + kRowBlock - 1) / kRowBlock;
    return chunks <= 1 ? most : (blocks + chunks - 1) / chunks * kRowBlock;
}

// y = finish(x @ weight).
template <class Product>
inline Status multiply(const LinearArgs& a, int64_t tokens, Pool& pool) {
    const int64_t most = chunk_rows<Product>(a, tokens);
    for (int64_t first = 0; first < tokens; first += most) {
        const int64_t rows = tokens - first < most ? tokens - first : most;
        const Chunk<Product> chunk(a, first, rows,
                                   shared_scratch(pool, Product::num_bytes(a, rows)), pool);
        parallel_rows(pool, rows, a.weight.in, [&](int64_t row, int64_t stop) {
            for (; row < stop; ++row) chunk.product.prepare(row, first + row);
        });
        parallel(pool, chunk.num_tiles(),
                 [&](int64_t tile, int worker) { chunk.multiply_tile(tile, pool, worker); });
    }
    return Status::ok;
}

// Some rows of one of the products that are computed at once: `first` is the first of them in y.
// They are prepared `offset` bytes into the memory of all; first_row and first_tile count the rows
// and tiles of the pieces before it.
struct Piece {
    int64_t product, first, rows;
    int64_t offset = 0, first_row = 0, first_tile = 0;
};

// The last piece that begins at or before the place, among those of rows or of tiles.
inline const Piece& piece_at(const Piece* pieces, int64_t count, int64_t Piece::*start,
                             int64_t place) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (pieces[middle].*start <= place ? low : high) = middle;
    }
    return pieces[low];
}

inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Compute pieces of products of one shape: `products.args(product)` are those of one, and row r of
// its y comes from row products.source(r) of its x. A tile is of one piece.
template <class Product, class Products>
inline void multiply_pieces(const Products& products, Piece* pieces, int64_t count, char* memory,
                            Pool& pool) {
    const auto chunk_of = [&](const LinearArgs& own, const Piece& piece) {
        return Chunk<Product>(own, piece.first, piece.rows, memory + piece.offset, pool, count);
    };
    int64_t rows = 0, tiles = 0, width = 0;
    for (Piece* piece = pieces; piece < pieces + count; ++piece) {
        const LinearArgs own = products.args(piece->product);
        piece->first_row = rows;
        piece->first_tile = tiles;
        rows += piece->rows;
        tiles += chunk_of(own, *piece).num_tiles();
        width = own.weight.in;
    }
    parallel_rows(pool, rows, width, [&](int64_t row, int64_t stop) {
        while (row < stop) {
            const Piece& piece = piece_at(pieces, count, &Piece::first_row, row);
            const LinearArgs own = products.args(piece.product);
            const Product product(own, piece.rows, memory + piece.offset);
            const int64_t end = piece.first_row + piece.rows, last = end < stop ? end : stop;
            for (; row < last; ++row) {
                const int64_t at = row - piece.first_row;
                product.prepare(at, products.source(piece.first + at));
            }
        }
    });
    parallel(pool, tiles, [&](int64_t tile, int worker) {
        const Piece& piece = piece_at(pieces, count, &Piece::first_tile, tile);
        const LinearArgs own = products.args(piece.product);
        chunk_of(own, piece).multiply_tile(tile - piece.first_tile, pool, worker);
    });
}

// The products of heads, whose elements have so many bytes.
struct HeadProducts {
    const HeadsArgs& a;
    int64_t element_bytes;

    LinearArgs args(int64_t head) const {
        const auto of_head = [&](const Rows& rows) {
            char* data = static_cast<char*>(rows.data) + head * rows.row_stride * element_bytes;
            return Rows{data, rows.token_stride, rows.row_stride};
        };
        LinearArgs own = a.first;
        own.weight.panels = static_cast<const char*>(own.weight.panels) + head * a.weight_bytes;
        own.x = of_head(own.x);
        own.y = of_head(own.y);
        return own;
    }
    int64_t source(int64_t row) const { return row; }
};

template <class Product>
inline Status multiply_heads(const HeadsArgs& a, int64_t tokens, Pool& pool, int64_t bytes) {
    const int64_t most = chunk_rows<Product>(a.first, tokens), list = a.heads * sizeof(Piece);
    for (int64_t first = 0; first < tokens; first += most) {
        const int64_t rows = tokens - first < most ? tokens - first : most;
        const int64_t apart = whole_lines(Product::num_bytes(a.first, rows));
        char* memory =
            static_cast<char*>(shared_scratch(pool, whole_lines(list) + a.heads * apart));
        auto* pieces = reinterpret_cast<Piece*>(memory);
        for (int64_t h = 0; h < a.heads; ++h) pieces[h] = {h, first, rows, h * apart};
        multiply_pieces<Product>(HeadProducts{a, bytes}, pieces, a.heads,
                                 memory + whole_lines(list), pool);
    }
    return Status::ok;
}

// Of prepared rows of groups at once; the products of further ones follow in another region.
constexpr int64_t kGroupBytes = 64 << 20;

struct GroupProducts {
    const GroupedArgs& a;

    LinearArgs args(int64_t weight) const {
        LinearArgs own = a.product;
        own.weight = a.weights[weight];
        own.weight.is_streamed = a.product.weight.is_streamed;
        return own;
    }
    int64_t source(int64_t row) const { return a.sources == nullptr ? row : a.sources[row]; }
};

// body(piece, bytes of its prepared rows) for the chunks of all groups.
template <class Product, class Body>
inline void each_piece(const GroupedArgs& a, const Body& body) {
    for (const RowGroup* group = a.groups; group < a.groups + a.num_groups; ++group) {
        const LinearArgs own = GroupProducts{a}.args(group->weight);
        const int64_t most = chunk_rows<Product>(own, group->rows);
        for (int64_t done = 0; done < group->rows; done += most) {
            const int64_t left = group->rows - done, rows = left < most ? left : most;
            body(Piece{group->weight, group->first + done, rows},
                 whole_lines(Product::num_bytes(own, rows)));
        }
    }
}

template <class Product>
inline Status multiply_groups(const GroupedArgs& a, Pool& pool) {
    int64_t count = 0, total = 0, room = kGroupBytes;
    each_piece<Product>(a, [&](const Piece&, int64_t bytes) {
        ++count;
        total += bytes;
        if (room < bytes) room = bytes;
    });
    const int64_t list = whole_lines(count * sizeof(Piece));
    char* memory = static_cast<char*>(shared_scratch(pool, list + (total < room ? total : room)));
    auto* pieces = reinterpret_cast<Piece*>(memory);
    int64_t waiting = 0, offset = 0;
    const auto compute = [&] {
        multiply_pieces<Product>(GroupProducts{a}, pieces, waiting, memory + list, pool);
        waiting = offset = 0;
    };
    each_piece<Product>(a, [&](const Piece& piece, int64_t bytes) {
        if (offset + bytes > room) compute();
        pieces[waiting] = piece;
        pieces[waiting++].offset = offset;
        offset += bytes;
    });
    if (waiting > 0) compute();
    return Status::ok;
}

}  // namespace quire::QUIRE_LEVEL
