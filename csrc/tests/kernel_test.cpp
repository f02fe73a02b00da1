// Runs every kernel of every level that this machine can run over odd sizes, on buffers whose ends
// AddressSanitizer guards, and checks that one row alone gives the bits it gives among others.
// Values are checked by the conformance tests in Python; this is about memory and undefined
// behaviour.

#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "core/arena.hpp"
#include "core/pool.hpp"
#include "core/program.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"

namespace quire {
namespace {

constexpr int64_t kWidths[] = {1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129};
constexpr int64_t kTokens[] = {0, 1, 2, 5, 33};

// Exactly as many bytes as rows of a stride need, the last row without what follows it.
struct Array {
    Array(Type type, int64_t rows, int64_t width, int64_t stride)
        : type(type),
          stride(stride),
          bytes(rows ? ((rows - 1) * stride + width) * size_of(type) : 0) {}

    // Small numbers of both signs, and bit patterns of every kind where `wild`.
    void fill(uint32_t seed, bool wild) {
        for (size_t i = 0; i * size_of(type) < bytes.size(); ++i) {
            seed = seed * 1664525u + 1013904223u;
            float value = static_cast<float>(static_cast<int32_t>(seed)) / 1e9f;
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            if (wild) bits = seed;
            if (type == Type::f32) std::memcpy(&bytes[i * 4], &bits, 4);
            uint16_t half = static_cast<uint16_t>(wild ? seed >> 7 : bits >> 16);
            if (type == Type::f16 && !wild)
                half = static_cast<uint16_t>((seed >> 16 & 0x83ff) | 0x3800);
            if (type != Type::f32) std::memcpy(&bytes[i * 2], &half, 2);
        }
    }
    void* row(int64_t i) { return bytes.data() + i * stride * size_of(type); }
    Rows rows() { return {bytes.data(), stride, 0}; }

    Type type;
    int64_t stride;
    std::vector<unsigned char> bytes;
};

// Run for all tokens, then for each alone, and compare the rows that both wrote to `out`.
template <class Args, class Shift>
void check_rows(Pool& pool, Kernel<Args> kernel, const Args& args, int64_t tokens, Array& out,
                int64_t width, const Shift& shift, const std::string& what) {
    Pool::Lease lease(pool);
    require(kernel(args, tokens, pool) == Status::ok, what);
    const std::vector<unsigned char> together = out.bytes;
    for (int64_t token = 0; token < tokens; ++token) {
        Args one = args;
        shift(one, token);
        require(kernel(one, 1, pool) == Status::ok, what);
        const size_t at = token * out.stride * size_of(out.type);
        require(std::memcmp(&together[at], &out.bytes[at], width * size_of(out.type)) == 0,
                what + ": another result for a row alone");
    }
}

void move(Rows& rows, Type type, int64_t tokens) {
    rows.data = static_cast<unsigned char*>(rows.data) + tokens * rows.token_stride * size_of(type);
}

struct Shape {
    Type type;
    int64_t tokens;
    int64_t width;
    bool wild;
};

void check_norms(Pool& pool, const Kernels& kernels, const Shape& s) {
    Array x(s.type, s.tokens, s.width, s.width + 3), delta(s.type, s.tokens, s.width, s.width + 1);
    Array sum(s.type, s.tokens, s.width, s.width), out(s.type, s.tokens, s.width, s.width);
    Array weight(s.type, 1, s.width, s.width), bias(s.type, 1, s.width, s.width);
    x.fill(1, s.wild), delta.fill(2, s.wild), weight.fill(3, false), bias.fill(4, false);
    for (int kind = 0; kind <= static_cast<int>(NormKind::none); ++kind)
        for (bool has_bias : {false, true}) {
            const bool bare = static_cast<NormKind>(kind) == NormKind::none;
            const NormParams params{static_cast<NormKind>(kind), 1e-5f,
                                    bare ? nullptr : weight.row(0),
                                    has_bias && !bare ? bias.row(0) : nullptr, 0};
            const NormArgs norm{s.type, 1, s.width, x.rows(), out.rows(), params};
            check_rows(
                pool, kernels.norm, norm, s.tokens, out, s.width,
                [&](NormArgs& a, int64_t t) { move(a.x, s.type, t), move(a.out, s.type, t); },
                "norm");
            const AddArgs add{s.type, s.width, 0.37f, x.rows(), delta.rows(), sum.rows()};
            const AddNormArgs both{add, out.rows(), params};
            check_rows(
                pool, kernels.add_norm, both, s.tokens, out, s.width,
                [&](AddNormArgs& a, int64_t t) {
                    move(a.add.x, s.type, t), move(a.add.delta, s.type, t);
                    move(a.add.sum, s.type, t), move(a.out, s.type, t);
                },
                "add_norm");
        }
}

void check_sums(Pool& pool, const Kernels& kernels, const Shape& s) {
    Array x(s.type, s.tokens, s.width, s.width + 3), delta(s.type, s.tokens, s.width, s.width + 1);
    Array out(s.type, s.tokens, s.width, s.width), gate(s.type, s.tokens, 1, 2);
    x.fill(1, s.wild), delta.fill(2, s.wild), gate.fill(3, s.wild);
    for (float scale : {1.0f, 0.37f}) {
        const AddArgs add{s.type, s.width, scale, x.rows(), delta.rows(), out.rows()};
        check_rows(
            pool, kernels.add, add, s.tokens, out, s.width,
            [&](AddArgs& a, int64_t t) {
                move(a.x, s.type, t), move(a.delta, s.type, t), move(a.sum, s.type, t);
            },
            "add");
    }
    for (Array* gates : {&gate, &delta}) {
        const int64_t gate_width = gates == &gate ? 1 : s.width;
        const ScaleGateArgs args{s.type, s.width, gate_width, x.rows(), gates->rows(), out.rows()};
        check_rows(
            pool, kernels.scale_gate, args, s.tokens, out, s.width,
            [&](ScaleGateArgs& a, int64_t t) {
                move(a.y, s.type, t), move(a.gate, s.type, t), move(a.out, s.type, t);
            },
            "scale_gate");
    }
}

// Whole, and cut in two: the same bits.
void check_sum_chunks(Pool& pool, const Kernels& kernels, const Shape& s) {
    if (s.tokens == 0) return;
    Array x(s.type, s.tokens, s.width, s.width + 3);
    x.fill(1, s.wild);
    Pool::Lease lease(pool);
    std::vector<std::vector<float>> found;
    for (int64_t cut : {s.tokens, s.tokens / 2}) {
        std::vector<float> spans(s.width), rest(s.width);
        for (int64_t first = 0, stop = cut; first < stop; first = stop, stop = s.tokens) {
            const int64_t chunk[3] = {first, first, stop - first};
            const SumChunksArgs args{s.type, s.width,      2,          x.rows(), s.tokens,
                                     chunk,  spans.data(), rest.data()};
            require(kernels.sum_chunks(args, 1, pool) == Status::ok, "sum_chunks");
        }
        spans.insert(spans.end(), rest.begin(), rest.end());
        found.push_back(spans);
    }
    if (s.tokens > 1)
        require(!std::memcmp(found[0].data(), found[1].data(), sizeof(float) * 2 * s.width),
                "sum_chunks in two");
}

void check_embed(Pool& pool, const Kernels& kernels, const Shape& s) {
    constexpr int64_t kTable = 9;
    Array table(s.type, kTable, s.width, s.width + 1), places(s.type, kTable, s.width, s.width);
    Array out(s.type, s.tokens, s.width, s.width);
    table.fill(1, s.wild), places.fill(2, s.wild);
    std::vector<int64_t> ids(s.tokens);
    for (int64_t i = 0; i < s.tokens; ++i) ids[i] = (i * 5 + 8) % kTable;
    for (void* place : {static_cast<void*>(nullptr), places.row(0)}) {
        EmbedArgs args{s.type, s.width,       0.7f,  ids.data(), table.row(0),
                       kTable, table.stride,  false, nullptr,    ids.data(),
                       place,  kTable,        places.stride,     out.rows()};
        check_rows(
            pool, kernels.embed, args, s.tokens, out, s.width,
            [&](EmbedArgs& a, int64_t t) {
                a.ids += t, a.positions += t;
                move(a.out, s.type, t);
            },
            "embed");
        for (int64_t wrong : {int64_t{-1}, kTable, INT64_MIN, INT64_MAX}) {
            if (s.tokens == 0) continue;
            std::vector<int64_t> bad = ids;
            bad.back() = wrong;
            args.ids = bad.data();
            Pool::Lease lease(pool);
            require(kernels.embed(args, s.tokens, pool) == Status::bad_index, "a bad id was taken");
        }
    }
}

// Rows of several lengths over latents in blocks: stored, then attended to together and token by
// token.
void check_latents(Pool& pool, const Kernels& kernels, Type type, int64_t heads, int64_t rank) {
    constexpr int64_t kRotated = 6, kBlock = 3, kBlocks = 200, kTokens = 9;
    const int32_t starts[] = {0, 1, 8, 9}, lengths[] = {1, 300, 259}, rows[] = {0, 1, 2};
    const int64_t width = rank + kRotated;
    Array memory(type, kBlocks * kBlock, width, width), x(type, kTokens, width, width + 1);
    Array q(type, kTokens, heads * rank, heads * rank),
        turned(type, kTokens, heads * kRotated, heads * kRotated);
    Array rotated(type, kTokens, heads * kRotated, heads * kRotated);
    Array weight(type, 1, rank, rank), out(type, kTokens, heads * rank, heads * rank);
    memory.fill(1, false), x.fill(2, false), q.fill(3, false), turned.fill(4, false);
    weight.fill(5, false);
    const std::vector<float> angles(kBlocks * kRotated, 0.5f);
    std::vector<int32_t> table(3 * kBlocks);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i % kBlocks);
    std::vector<int64_t> slots(kTokens);
    for (int64_t i = 0; i < kTokens; ++i) slots[i] = kBlocks * kBlock - 1 - i;
    const LatentMemory latents{static_cast<char*>(memory.row(0)),
                               kBlocks,
                               kBlock,
                               static_cast<int64_t>(kBlock * width * size_of(type)),
                               rank,
                               kRotated};
    const auto heads_of = [&](Array& array, int64_t each) {
        return Rows{array.row(0), heads * each, each};
    };
    Pool::Lease lease(pool);
    for (bool is_interleaved : {false, true}) {
        std::vector<int64_t> positions(kTokens, kBlocks - 1);
        const LatentStoreArgs store{type,
                                    heads,
                                    heads_of(turned, kRotated),
                                    rotated.row(0),
                                    x.rows(),
                                    latents,
                                    slots.data(),
                                    positions.data(),
                                    angles.data(),
                                    kBlocks,
                                    is_interleaved,
                                    {NormKind::rms, 1e-5f, weight.row(0), nullptr, 0}};
        require(kernels.latent_store(store, kTokens, pool) == Status::ok, "latent_store");
        positions.back() = kBlocks;
        require(kernels.latent_store(store, kTokens, pool) == Status::bad_index,
                "a position outside of the table was taken");
    }
    AttentionStep step{3, starts, lengths, table.data(), rows, kBlocks};
    LatentAttendArgs args{
        type,  heads, heads_of(q, rank), heads_of(rotated, kRotated), out.row(0), latents,
        &step, 0.3};
    require(kernels.latent_attend(args, kTokens, pool) == Status::ok, "latent_attend");
    const std::vector<unsigned char> together = out.bytes;
    for (int64_t token = kTokens - 1; token >= 0; --token) {
        const int32_t row = token == 0 ? 0 : token < 8 ? 1 : 2, one[] = {0, 1};
        const int32_t length = lengths[row] - (starts[row + 1] - 1 - static_cast<int32_t>(token));
        step = {1, one, &length, table.data() + row * kBlocks, rows, kBlocks};
        args.q.data = q.row(token), args.q_rotated.data = rotated.row(token);
        args.out = out.row(token);
        require(kernels.latent_attend(args, 1, pool) == Status::ok, "latent_attend");
    }
    require(together == out.bytes, "latent_attend: another result for a token alone");
    step = {3, starts, lengths, table.data(), rows, kBlocks};
    for (int32_t wrong : {-1, static_cast<int32_t>(kBlocks)}) {
        table[2 * kBlocks] = wrong;
        require(kernels.latent_attend(args, kTokens, pool) == Status::bad_index,
                "a bad block was taken");
    }
}

void check_kernels(Level level) {
    const Kernels kernels = kernels_for(level);
    Pool pool(3);
    for (Type type : kTypes)
        for (int64_t width : kWidths)
            for (int64_t tokens : kTokens)
                for (bool wild : {false, true}) {
                    const Shape shape{type, tokens, width, wild};
                    check_norms(pool, kernels, shape);
                    check_sums(pool, kernels, shape);
                    check_sum_chunks(pool, kernels, shape);
                    check_embed(pool, kernels, shape);
                }
    for (Type type : kTypes)
        for (int64_t heads : {1, 5, 20, 130}) check_latents(pool, kernels, type, heads, 19);
}

// The loops of a benchmark read what they are given and no byte more.
void check_limits(const Kernels& kernels) {
    Pool pool(2);
    Pool::Lease lease(pool);
    for (int64_t pieces : {0, 1, 3}) {
        const std::vector<char> memory(pieces * kReadPiece);
        require(kernels.read(ReadArgs{memory.data()}, pieces, pool) == Status::ok, "read");
    }
    const Memory start(kStartBytes);
    for (Operand operand : {Operand::f32, Operand::bf16, Operand::int8}) {
        int64_t operations = 0;
        const MultiplyArgs args{operand, 7, start.data(), &operations};
        require(kernels.multiply_add(args, 3, pool) == Status::ok, "multiply_add");
        require(operations > 0 && operations % (3 * 7 * 32) == 0, "operations");
    }
}

// Every tile exactly once, whatever the size, with threads coming, sleeping and going.
void check_pool() {
    Pool pool(4);
    for (int round = 0; round < 400; ++round) {
        if (round % 50 == 0) pool.resize(1 + round / 50);
        if (round % 20 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
        const int64_t tiles = round * 7 % 97;
        std::vector<int> counts(tiles);
        Pool::Lease lease(pool);
        parallel(pool, tiles, [&](int64_t tile, int worker) {
            auto* memory = static_cast<int*>(scratch(pool, worker, 64 + tile));
            memory[0] = static_cast<int>(tile);
            counts[tile] += memory[0] == tile;
        });
        for (int count : counts) require(count == 1, "a tile did not run once");
    }
}

// The owner leaves its core while another thread takes long over the last tile.
void check_waiting() {
    Pool pool(2);
    Pool::Lease lease(pool);
    const std::clock_t before = std::clock();
    parallel(pool, 2, [](int64_t, int worker) {
        std::this_thread::sleep_for(std::chrono::milliseconds(worker == 0 ? 1 : 200));
    });
    const double taken = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
    require(taken < 0.1, "the owner computed while it waited");
}

// Several threads that want the same pool take turns.
void check_turns() {
    Pool pool(3);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
            for (int round = 0; round < 200; ++round) {
                std::vector<int> counts(11);
                Pool::Lease lease(pool);
                parallel(pool, 11, [&](int64_t tile, int) { counts[tile] += 1; });
                for (int count : counts) require(count == 1, "a tile did not run once");
            }
        });
    for (std::thread& thread : threads) thread.join();
}

void check_program() {
    const Kernels kernels = kernels_for(Level::portable);
    Pool pool(2);
    Arena arena;
    auto* x = reinterpret_cast<float*>(arena.take(100 * sizeof(float)));
    auto* y = reinterpret_cast<float*>(arena.take(100 * sizeof(float)));
    for (int i = 0; i < 100; ++i) x[i] = static_cast<float>(i);
    Program program;
    program.append(kernels.add, AddArgs{Type::f32, 10, 1, {x, 10, 0}, {x, 10, 0}, {y, 10, 0}});
    program.append_foreign(5);
    program.append(kernels.add, AddArgs{Type::f32, 10, 1, {y, 10, 0}, {x, 10, 0}, {y, 10, 0}});
    int calls = 0;
    const auto foreign = [&](int number, int64_t tokens) {
        require(number == 5 && tokens == 3, "a foreign entry got other arguments");
        Pool::Lease lease(pool);  // it may use the pool itself
        ++calls;
        return calls == 1 ? Status::ok : Status::interrupted;
    };
    require(program.replay(pool, 3, foreign) == Status::ok, "replay");
    require(y[29] == 87 && y[30] == 0, "a replay wrote other rows");
    require(program.replay(pool, 3, foreign) == Status::interrupted, "a failure was lost");
    require(arena.owns(x + 99) && !arena.owns(&calls), "owns");
    arena.give_back(reinterpret_cast<std::byte*>(x));
    require(arena.take(90 * sizeof(float)) == reinterpret_cast<std::byte*>(x), "not used again");
}

}  // namespace
}  // namespace quire

int main() {
    using namespace quire;
    check_pool();
    check_turns();
    check_waiting();
    check_program();
    check_levels([](Level level) {
        check_kernels(level);
        check_limits(kernels_for(level));
    });
    return 0;
}
