// Runs the kernels of adapters at every level over odd sizes, on buffers that are exactly as long
// as they must be and whose ends AddressSanitizer guards, and checks that a row alone gives the
// bits that it gives among others. Values are checked in Python.

#include <cstring>
#include <string>
#include <vector>

#include "core/pool.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"

namespace quire {
namespace {

constexpr int64_t kSlots = 3, kMaxRank = 11;
constexpr int32_t kRanks[] = {11, 1, 0, 8, 5, 11};  // of two parts in each slot

std::vector<unsigned char> numbers(Type type, int64_t count, uint32_t seed) {
    std::vector<unsigned char> bytes(count * size_of(type));
    fill_numbers(bytes.data(), type, count, seed);
    return bytes;
}

// A bank of a product of two parts, the second in two pieces.
struct Bank {
    Bank(Type type, int64_t in, int64_t first, int64_t second, int64_t segments) {
        const int64_t sizes[] = {first, second, second}, parts[] = {0, 1, 1};
        int64_t start = 0, blocks = 0;
        for (int i = 0; i < 3; ++i) {
            pieces.push_back({start, sizes[i], parts[i], blocks});
            start += sizes[i], blocks += (sizes[i] + kLoraBlock - 1) / kLoraBlock;
        }
        out = start;
        a = numbers(type, kSlots * 2 * kMaxRank * in, 1);
        b = numbers(type, kSlots * blocks * kMaxRank * kLoraBlock, 2);
        ranks.assign(kRanks, kRanks + 6);
        native = {type,     in,           segments,      2, kMaxRank, blocks, a.data(),
                  b.data(), ranks.data(), pieces.data(), 3};
    }

    int64_t out;
    std::vector<unsigned char> a, b;
    std::vector<int32_t> ranks;
    std::vector<LoraPiece> pieces;
    LoraBank native;
};

std::vector<float> expanded(Pool& pool, const Kernels& kernels, const Bank& bank, Type type,
                            void* x, const int32_t* slots, int64_t tokens) {
    std::vector<float> factors(tokens * 2 * kMaxRank), values(tokens * bank.out);
    std::vector<int32_t> used(tokens);
    const LoraShrinkArgs shrink{bank.native, type, {x, bank.native.in, 0}, slots, factors.data(),
                                used.data(), false};
    kernels.lora_shrink(shrink, tokens, pool);
    const LoraExpandArgs expand{
        {bank.native, factors.data(), used.data()}, bank.out, values.data()};
    kernels.lora_expand(expand, tokens, pool);
    return values;
}

void check_product(Pool& pool, const Kernels& kernels, Type type, const Bank& bank) {
    for (int64_t tokens : {0, 1, 2, 5, 33}) {
        std::vector<unsigned char> x = numbers(type, tokens * bank.native.in, 3);
        std::vector<int32_t> slots(tokens);
        for (int64_t t = 0; t < tokens; ++t) slots[t] = static_cast<int32_t>(t % 4) - 1;
        const auto all = expanded(pool, kernels, bank, type, x.data(), slots.data(), tokens);
        for (int64_t t = 0; t < tokens; ++t) {
            unsigned char* row = x.data() + t * bank.native.in * size_of(type);
            const auto alone = expanded(pool, kernels, bank, type, row, &slots[t], 1);
            require(std::memcmp(alone.data(), &all[t * bank.out], bank.out * 4) == 0,
                    "a row alone has other bits");
            bool is_zero = true;
            for (float value : alone) is_zero &= value == 0;
            require(is_zero == (slots[t] < 0), "rows without an adapter, and no others, are zero");
        }
    }
}

void check_embedding(Pool& pool, const Kernels& kernels, Type type, int64_t width) {
    const int64_t ids[] = {0, 6, 3}, vocab = 7, blocks = (width + kLoraBlock - 1) / kLoraBlock;
    const int32_t slots[] = {0, -1, 2}, ranks[] = {11, 0, 5};
    const LoraPiece piece{0, width, 0, 0};
    std::vector<unsigned char> a = numbers(type, kSlots * vocab * kMaxRank, 1);
    std::vector<unsigned char> b = numbers(type, kSlots * blocks * kMaxRank * kLoraBlock, 2);
    std::vector<unsigned char> x = numbers(type, 3 * width, 3), out(x.size());
    const LoraBank bank{type, vocab, 1, 1, kMaxRank, blocks, a.data(), b.data(), ranks, &piece, 1};
    const LoraEmbedArgs args{
        bank, type, width, 2.0f, {x.data(), width, 0}, ids, slots, {out.data(), width, 0}};
    kernels.lora_embed(args, 3, pool);
    const size_t row = width * size_of(type);
    require(std::memcmp(&out[row], &x[row], row) == 0, "a row without an adapter is as it was");
    require(std::memcmp(&out[0], &x[0], row) != 0, "a row with an adapter is not");
}

void check_level(Level level) {
    const Kernels kernels = kernels_for(level);
    Pool pool(2);
    for (Type type : kTypes) {
        for (int64_t in : {4, 12, 68, 256})
            for (int64_t segments : {1, 2, 4})
                check_product(pool, kernels, type, Bank(type, in, 33, 7, segments));
        for (int64_t width : {1, 31, 32, 70}) check_embedding(pool, kernels, type, width);
    }
}

}  // namespace
}  // namespace quire

int main() {
    quire::check_levels(quire::check_level);
    return 0;
}
