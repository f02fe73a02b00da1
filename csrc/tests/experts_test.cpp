// Runs mixtures of experts at every level, on buffers that are exactly as long as they must be and
// whose ends AddressSanitizer guards, and checks that a token alone gives the bits that it gives
// among others, and that a choice which is not an expert is refused. Values are checked in Python.

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/pool.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"
#include "tests/weights.hpp"

namespace quire {
namespace {

constexpr int64_t kExperts = 5, kTopK = 2;
constexpr int64_t kTokens[] = {0, 1, 3, 40, 400};
constexpr int64_t kRank = 3, kSlots = 2;

// A bank of the adapters of all experts, of one part.
struct Bank {
    Bank(Type type, int64_t in, int64_t out)
        : blocks((out + kLoraBlock - 1) / kLoraBlock),
          a(kSlots * kExperts * kRank * in * size_of(type)),
          b(kSlots * kExperts * blocks * kRank * kLoraBlock * size_of(type)),
          ranks(kSlots * kExperts, kRank),
          piece{0, out, 0, 0} {
        ranks[1] = 0;
        native = {type,
                  in,
                  1,
                  1,
                  kRank,
                  blocks,
                  a.fill(type, 1).as<void>(),
                  b.fill(type, 2).as<void>(),
                  ranks.data(),
                  &piece,
                  1};
    }

    int64_t blocks;
    Bytes a, b;
    std::vector<int32_t> ranks;
    LoraPiece piece;
    LoraBank native;
};

// The experts of a layer: weights of a kind, made by make(e, in, out, is_gated).
template <class W, class Make>
void check_experts(Pool& pool, const Kernels& kernels, int64_t in, int64_t inner, bool is_gated,
                   const Make& make) {
    std::vector<W> weights;
    std::vector<PackedWeight> up, down;
    weights.reserve(2 * kExperts);
    const auto add = [&](std::vector<PackedWeight>& to, W weight, int64_t segments) {
        weights.push_back(std::move(weight));
        pack(pool, kernels, weights.back());
        weights.back().packed.segments = segments;
        to.push_back(weights.back().packed);
    };
    for (int64_t e = 0; e < kExperts; ++e) {
        add(up, make(in, is_gated ? 2 * inner : inner, is_gated), 1);
        add(down, make(inner, in, false), 1);
        down.back().segments = segments_of(down.back());
    }
    const Type type = up[0].type;
    Bank up_bank(type, in, up[0].out), down_bank(type, inner, in);
    for (const bool has_adapters : {false, true})
        for (int64_t tokens : kTokens) {
            const bool weighs_input = tokens == 3 || tokens == 40;
            const int64_t row = in * size_of(type);
            Bytes x(tokens * row), y(tokens * row), one(row), shares(tokens * kTopK * 4);
            x.fill(type, 7);
            shares.fill(Type::f32, 9);
            std::vector<int32_t> chosen(tokens * kTopK), slots(tokens);
            for (int64_t t = 0; t < tokens; ++t) {
                slots[t] = static_cast<int32_t>(t % 3) - 1;
                chosen[t * kTopK] = static_cast<int32_t>(t % 7 == 0 ? 4 : t % 2);
                chosen[t * kTopK + 1] = static_cast<int32_t>(t % 4);
            }
            const auto run = [&](int64_t first, int64_t count, void* to) {
                ExpertsArgs args{};
                args.experts = kExperts;
                args.top_k = kTopK;
                args.up = up.data();
                args.down = down.data();
                args.up_product = product_with(up[0], kernels);
                args.down_product = product_with(down[0], kernels);
                args.finish = {is_gated ? FinishKind::bounded : FinishKind::plain, Act::silu, 2, 0};
                args.x = {x.as<unsigned char>() + first * row, in, 0};
                args.y = {to, in, 0};
                args.chosen = chosen.data() + first * kTopK;
                args.weights = shares.as<float>() + first * kTopK;
                args.weighs_input = weighs_input;
                args.shrink = kernels.lora_shrink;
                if (has_adapters) {
                    args.slots = slots.data() + first;
                    args.up_bank = up_bank.native;
                    if (tokens != 3) args.down_bank = down_bank.native;
                }
                return kernels.experts(args, count, pool);
            };
            Pool::Lease lease(pool);
            require(run(0, tokens, y.as<void>()) == Status::ok, "experts");
            for (int64_t t = 0; t < tokens; t += tokens < 9 ? 1 : 67) {
                run(t, 1, one.as<void>());
                require(std::memcmp(one.data.get(), &y.data[t * row], row) == 0,
                        "a token alone differs: in " + std::to_string(in) + ", inner " +
                            std::to_string(inner) + ", tokens " + std::to_string(tokens));
            }
            for (int32_t wrong : {-1, static_cast<int32_t>(kExperts), INT32_MIN, INT32_MAX})
                if (tokens > 0) {
                    chosen[tokens * kTopK - 1] = wrong;
                    require(run(0, tokens, y.as<void>()) == Status::bad_index, "a wrong choice");
                }
        }
}

void check_type(Pool& pool, const Kernels& kernels, Type type, int64_t in, int64_t inner,
                bool is_gated) {
    const auto check = [&](WeightForm form, int64_t group, bool is_weight_only) {
        check_experts<Weight>(pool, kernels, in, inner, is_gated,
                              [&](int64_t width, int64_t out, bool is_gate) {
                                  Weight weight(type, form, width, out, group, is_gate);
                                  weight.packed.is_weight_only = is_weight_only;
                                  return weight;
                              });
    };
    const auto check_coded = [&](WeightForm form, int64_t group, bool has_zeros) {
        check_experts<CodedWeight>(
            pool, kernels, in, inner, is_gated, [&](int64_t width, int64_t out, bool is_gate) {
                return CodedWeight(type, form, width, out, group, Type::f16, has_zeros, is_gate);
            });
    };
    check(WeightForm::plain, 0, false);
    for (const bool is_weight_only : {false, true}) {
        check(WeightForm::int8, 0, is_weight_only);
        check(WeightForm::int4, 32, is_weight_only);
    }
    check_coded(WeightForm::codes4, 16, true);
    check_coded(WeightForm::codes4, 64, false);
    check_coded(WeightForm::codes8, 64, in > 100);
}

void check_level(Level level) {
    const Kernels kernels = kernels_for(level);
    Pool pool(2);
    for (Type type : kTypes)
        for (bool is_gated : {false, true}) {
            check_type(pool, kernels, type, 70, 34, is_gated);
            check_type(pool, kernels, type, 130, 128, is_gated);
        }
}

}  // namespace
}  // namespace quire

int main() {
    quire::check_levels(quire::check_level);
    return 0;
}
