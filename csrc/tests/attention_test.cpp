// Stores keys and values and attends to them at every level, over odd sizes, in memory whose ends
// AddressSanitizer guards: all rows together, then each token by itself, which must give the same
// bits. Slots that nothing was stored in hold NaN. Values are checked by the conformance tests in
// Python.

#include <cstring>
#include <string>
#include <vector>

#include "core/pool.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"

namespace quire {
#if defined(QUIRE_HAS_EMULATED)
namespace avx512_emulated {
void fill_attention(Kernels&);
}
#endif
namespace {

using Bytes = std::vector<unsigned char>;

struct Sizes {
    Type type;
    bool is_int8;
    int64_t heads, kv_heads, dim, block;
    int64_t window;
};

// Tokens that a row has in the step, and those with the ones before.
struct Row {
    int32_t count, length;
};
constexpr Row kRows[] = {{1, 1}, {7, 300}, {1, 259}, {0, 9}, {70, 75}, {2, 1030}};
constexpr int64_t kNumRows = std::size(kRows), kNumTokens = 81, kLongest = 1030;

int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// `count` numbers of both signs around 1.
Bytes numbers(Type type, int64_t count, uint32_t seed) {
    Bytes bytes(count * size_of(type));
    fill_numbers(bytes.data(), type, count, seed);
    return bytes;
}

bool has_nan(Type type, const Bytes& bytes) {
    for (size_t i = 0; i < bytes.size(); i += size_of(type)) {
        uint32_t bits = 0;
        std::memcpy(&bits, &bytes[i], size_of(type));
        const uint32_t exponent = type == Type::f32    ? 0x7f800000
                                  : type == Type::bf16 ? 0x7f80
                                                       : 0x7c00;
        if ((bits & exponent) == exponent) return true;
    }
    return false;
}

// KV memory of the rows, their blocks in an order of their own.
struct Paged {
    Sizes s;
    Bytes memory;
    KVMemory kv;
    std::vector<int32_t> table, rows;
    int64_t stride;

    explicit Paged(const Sizes& sizes) : s(sizes) {
        const int64_t size = s.is_int8 ? 1 : size_of(s.type);
        const int64_t pack = s.is_int8 ? 4 : s.type == Type::bf16 ? 2 : 1;
        const int64_t values = lines(s.block * ((s.dim + pack - 1) / pack * pack) * size);
        const int64_t key_scales = values + lines(s.block * s.dim * size);
        const int64_t value_scales = key_scales + lines(s.block * 4);
        const int64_t head = s.is_int8 ? value_scales + lines(s.block * 4) : key_scales;
        stride = kLongest / s.block + 1;
        const int64_t blocks = kNumRows * stride;
        memory.assign(blocks * s.kv_heads * head, 0xff);
        kv = {reinterpret_cast<char*>(memory.data()),
              blocks,
              s.block,
              s.kv_heads,
              s.dim,
              s.block % 16 ? s.block : 16,
              head,
              values,
              key_scales,
              value_scales,
              s.is_int8};
        for (int64_t i = 0; i < blocks; ++i)
            table.push_back(static_cast<int32_t>(i * 7919 % blocks));
        for (int32_t row = 0; row < kNumRows; ++row) rows.push_back(row);
    }

    AttentionStep step(int64_t count, const int32_t* starts, const int32_t* lengths,
                       int64_t first) const {
        return {count, starts, lengths, table.data() + first * stride, rows.data(), stride};
    }

    void store(Pool& pool, const Kernels& kernels) {
        for (int64_t row = 0; row < kNumRows; ++row) {
            const int64_t tokens = kRows[row].length, width = (s.heads + 2 * s.kv_heads) * s.dim;
            Bytes qkv = numbers(s.type, tokens * width, static_cast<uint32_t>(row));
            Bytes q(tokens * s.heads * s.dim * size_of(s.type));
            std::vector<int64_t> slots(tokens), positions(tokens);
            for (int64_t i = 0; i < tokens; ++i)
                slots[i] = table[row * stride + i / s.block] * s.block + i % s.block;
            const NormParams none{NormKind::none, 0, nullptr, nullptr, 0};
            const RopeStoreArgs args{s.type,
                                     s.heads,
                                     {qkv.data(), width, 0},
                                     q.data(),
                                     kv,
                                     slots.data(),
                                     positions.data(),
                                     nullptr,
                                     0,
                                     0,
                                     false,
                                     NormOver::none,
                                     false,
                                     none,
                                     none,
                                     __builtin_inff()};
            require(kernels.rope_store(args, tokens, pool) == Status::ok, "rope_store");
        }
    }
};

void check_attention(Pool& pool, const Kernels& kernels, const Sizes& s) {
    const std::string what = "attention of " + std::to_string(s.heads) + " over " +
                             std::to_string(s.kv_heads) + " heads of " + std::to_string(s.dim) +
                             ", blocks of " + std::to_string(s.block) + ", window " +
                             std::to_string(s.window) + ": ";
    Pool::Lease lease(pool);
    Paged paged(s);
    paged.store(pool, kernels);
    const int64_t width = s.heads * s.dim, size = size_of(s.type);
    Bytes q = numbers(s.type, kNumTokens * width, 99), out(kNumTokens * width * size);
    const auto& of_types = s.is_int8 ? kernels.attend_bytes : kernels.attend;
    const auto attend = of_types[static_cast<int>(s.type)];
    AttendArgs args{s.type,     s.heads,  {q.data(), width, s.dim},
                    out.data(), paged.kv, nullptr,
                    s.window,   0.3,      2.5,
                    {},         {}};
    int32_t starts[kNumRows + 1] = {}, lengths[kNumRows];
    for (int64_t row = 0; row < kNumRows; ++row) {
        starts[row + 1] = starts[row] + kRows[row].count;
        lengths[row] = kRows[row].length;
    }
    AttentionStep step = paged.step(kNumRows, starts, lengths, 0);
    args.step = &step;
    require(attend(args, kNumTokens, pool) == Status::ok, what + "status");
    require(!has_nan(s.type, out), what + "what was not stored was read");
    const Bytes together = out;
    for (int64_t row = 0; row < kNumRows; ++row)
        for (int32_t i = 0; i < kRows[row].count; ++i) {
            const int32_t one[] = {0, 1}, length = kRows[row].length - kRows[row].count + i + 1;
            step = paged.step(1, one, &length, row);
            args.q.data = q.data() + (starts[row] + i) * width * size;
            args.out = out.data() + (starts[row] + i) * width * size;
            require(attend(args, 1, pool) == Status::ok, what + "status");
        }
    require(together == out, what + "another result for a token alone");
    for (int32_t wrong : {-1, static_cast<int32_t>(paged.kv.num_blocks)}) {
        paged.table[0] = wrong;
        const int32_t one[] = {0, 1}, length = 1;
        step = paged.step(1, one, &length, 0);
        require(attend(args, 1, pool) == Status::bad_index, what + "a bad block was taken");
    }
}

void check_types(const Kernels& kernels, std::vector<Type> types) {
    Pool pool(3);
    for (Type type : types)
        for (bool is_int8 : {false, true}) {
            check_attention(pool, kernels, {type, is_int8, 2, 1, 64, 16, 0});
            check_attention(pool, kernels, {type, is_int8, 6, 2, 80, 32, 300});
            check_attention(pool, kernels, {type, is_int8, 5, 5, 19, 3, 9});
            check_attention(pool, kernels, {type, is_int8, 14, 1, 33, 16, 0});
        }
}

}  // namespace
}  // namespace quire

int main() {
    using namespace quire;
    check_levels(
        [](Level level) { check_types(kernels_for(level), {Type::f32, Type::bf16, Type::f16}); });
#if defined(QUIRE_HAS_EMULATED)
    if (refusal(Level::avx512).empty()) {
        Kernels kernels = kernels_for(Level::avx512);
        avx512_emulated::fill_attention(kernels);
        check_types(kernels, {Type::bf16});
        std::printf("emulated avx512_bf16: passed\n");
    }
#endif
    return 0;
}
