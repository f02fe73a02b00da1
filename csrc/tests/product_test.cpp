// Runs the matrix products of every level over odd sizes, on buffers that are exactly as long as
// they must be and whose ends AddressSanitizer guards, and checks that a row alone gives the bits
// that it gives among others. Values are checked in Python; here only those of the AVX512-BF16
// kernels with an emulated instruction, which Python does not see.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/pool.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"
#include "tests/weights.hpp"

namespace quire {
#if defined(QUIRE_HAS_EMULATED)
namespace avx512_emulated {
void fill_linear(Kernels&);
}
namespace avx_vnni_emulated {
void fill_coded_digits(Kernels&);
void fill_quantized(Kernels&);
}  // namespace avx_vnni_emulated
#endif
namespace {

constexpr int64_t kInputs[] = {1, 2, 7, 33, 128, 129, 260, 560};
constexpr int64_t kOutputs[] = {1, 2, 31, 32, 34, 70};
constexpr int64_t kTokens[] = {0, 1, 2, 5, 13, 33, 241};

void check_product(Pool& pool, const Kernels& kernels, const PackedWeight& w, Finish finish,
                   int64_t tokens) {
    const bool is_gate = finish.kind == FinishKind::gated || finish.kind == FinishKind::limited;
    if (is_gate != w.is_gated) return;
    const bool is_partial = finish.kind == FinishKind::partial;
    const int64_t width = is_gate ? w.out / 2 : w.out;
    const bool is_wide = is_partial || finish.kind == FinishKind::logits;
    const int64_t row = width * (is_wide ? 4 : size_of(w.type));
    Bytes x(tokens * w.in * size_of(w.type)), y(tokens * row), one(row);
    x.fill(w.type, 7);
    const auto kernel = product_with(w, kernels).linear;
    // An addend of every other row, and the peaks that rounded rows have anyway.
    Bytes values(2 * w.out * 4), rows(tokens * 4), peaks(tokens * 4);
    values.fill(Type::f32, 5);
    for (int64_t t = 0; t < tokens; ++t) {
        rows.as<int32_t>()[t] = t % 2 == 0 ? -1 : static_cast<int32_t>(t / 2 % 2);
        peaks.as<float>()[t] = 3;
    }
    const auto run = [&](int64_t first, int64_t count, void* to) {
        void* from = x.as<unsigned char>() + first * w.in * size_of(w.type);
        kernel({w,
                {from, w.in, 0},
                {to, width, w.out},
                finish,
                {values.as<float>(), w.out, rows.as<int32_t>() + first},
                is_partial ? peaks.as<float>() + first : nullptr},
               count, pool);
    };
    Pool::Lease lease(pool);
    run(0, tokens, y.as<void>());
    for (int64_t t = 0; t < tokens; t += tokens < 9 ? 1 : 7) {
        run(t, 1, one.as<void>());
        require(std::memcmp(one.data.get(), &y.data[t * row], row) == 0,
                "a row alone differs: in " + std::to_string(w.in) + ", out " +
                    std::to_string(w.out) + ", tokens " + std::to_string(tokens));
    }
}

void check_weight(Pool& pool, const Kernels& kernels, Weight weight) {
    pack(pool, kernels, weight);
    weight.packed.segments = segments_of(weight.packed);
    const Finish finishes[] = {
        {FinishKind::plain, Act::none, 1, 0},      {FinishKind::plain, Act::gelu, 1, 0},
        {FinishKind::gated, Act::silu, 1, 0},      {FinishKind::limited, Act::silu, 0.7f, 0},
        {FinishKind::logits, Act::none, 0.5f, 30}, {FinishKind::partial, Act::none, 1, 0}};
    for (int64_t tokens : kTokens)
        for (const Finish& finish : finishes)
            if (tokens < 100 || finish.kind == FinishKind::gated) {
                check_product(pool, kernels, weight.packed, finish, tokens);
                if (weight.packed.form == WeightForm::plain) continue;
                PackedWeight weight_only = weight.packed;
                weight_only.is_weight_only = true;
                check_product(pool, kernels, weight_only, finish, tokens);
            }
}

void check_codes(Pool& pool, const Kernels& kernels, CodedWeight weight) {
    pack(pool, kernels, weight);
    weight.packed.segments = segments_of(weight.packed);
    for (int64_t tokens : kTokens)
        for (FinishKind kind : {FinishKind::plain, FinishKind::gated, FinishKind::partial})
            if (tokens < 100 || kind == FinishKind::gated)
                check_product(pool, kernels, weight.packed, {kind, Act::silu, 1, 0}, tokens);
}

float wide(uint16_t bf16) {
    const uint32_t bits = uint32_t(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// bf16 products in fp32 against sums in double of what was packed: source [out, in], x [tokens,
// in].
void check_values(Pool& pool, const Kernels& kernels, int64_t in, int64_t out, int64_t tokens) {
    Weight weight(Type::bf16, WeightForm::plain, in, out, 0);
    pack(pool, kernels, weight);
    weight.packed.bias = nullptr;
    Bytes source(in * out * 2), x(tokens * in * 2), y(tokens * out * 4);
    source.fill(Type::bf16, 1);
    x.fill(Type::bf16, 7);
    Pool::Lease lease(pool);
    product_with(weight.packed, kernels)
        .linear({weight.packed,
                 {x.as<void>(), in, 0},
                 {y.as<void>(), out, 0},
                 {FinishKind::logits, Act::none, 1, 0}},
                tokens, pool);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t o = 0; o < out; ++o) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < in; ++i) {
                const double product = double(wide(x.as<uint16_t>()[t * in + i])) *
                                       wide(source.as<uint16_t>()[o * in + i]);
                sum += product;
                size += std::abs(product);
            }
            const double error = std::abs(y.as<float>()[t * out + o] - sum);
            require(error <= std::abs(sum) / 256 + size * 1e-5,  // logits are rounded to bf16
                    "a wrong sum: in " + std::to_string(in) + ", out " + std::to_string(out));
        }
}

#if defined(QUIRE_HAS_EMULATED)
void check_emulated() {
    Kernels kernels = kernels_for(Level::avx512);
    avx512_emulated::fill_linear(kernels);
    Pool pool(2);
    for (int64_t in : kInputs)
        for (int64_t out : kOutputs) {
            check_weight(pool, kernels, {Type::bf16, WeightForm::plain, in, out, 0});
            check_values(pool, kernels, in, out, 13);
        }
}

// Sums of integers have one value: the products of both tables are equal to the last bit.
void check_equal(Pool& pool, const Kernels& one, const Kernels& other, Weight weight,
                 int64_t tokens) {
    pack(pool, one, weight);
    Weight second(weight.packed.type, weight.packed.form, weight.packed.in, weight.packed.out,
                  weight.packed.group);
    pack(pool, other, second);
    const PackedWeight& w = weight.packed;
    Bytes x(tokens * w.in * size_of(w.type)), y(tokens * w.out * size_of(w.type)), z(y.count);
    x.fill(w.type, 7);
    Pool::Lease lease(pool);
    const Finish finish{FinishKind::plain, Act::none, 1, 0};
    const Rows from{x.as<void>(), w.in, 0};
    product_with(w, one).linear({w, from, {y.as<void>(), w.out, 0}, finish}, tokens, pool);
    product_with(w, other).linear({second.packed, from, {z.as<void>(), w.out, 0}, finish}, tokens,
                                  pool);
    require(std::memcmp(y.data.get(), z.data.get(), y.count) == 0,
            "AVX-VNNI has other sums: in " + std::to_string(w.in));
}

void check_emulated_vnni() {
    const Kernels avx2 = kernels_for(Level::avx2);
    Kernels kernels = avx2;
    avx_vnni_emulated::fill_quantized(kernels);
    avx_vnni_emulated::fill_coded_digits(kernels);
    Pool pool(2);
    for (int64_t in : kInputs) {
        check_codes(pool, kernels,
                    {Type::bf16, WeightForm::codes4, in, 34, 64, Type::f16, true, true});
        check_codes(pool, kernels, {Type::f16, WeightForm::codes8, in, 34, 32, Type::f16, false});
        for (WeightForm form : {WeightForm::int8, WeightForm::int4}) {
            const int64_t group = in > 100 ? 64 : 32;
            check_weight(pool, kernels, {Type::bf16, form, in, 34, group});
            for (int64_t tokens : kTokens)
                check_equal(pool, avx2, kernels, {Type::bf16, form, in, 34, group}, tokens);
        }
    }
}
#endif

void check_type(Pool& pool, const Kernels& kernels, Type type, int64_t in, int64_t out,
                bool is_gated) {
    const int64_t wide = in > 100 ? 64 : 32, group = in > 100 ? 16 : 8;
    check_weight(pool, kernels, {type, WeightForm::plain, in, out, 0, is_gated});
    check_weight(pool, kernels, {type, WeightForm::int8, in, out, 0, is_gated});
    check_weight(pool, kernels, {type, WeightForm::int4, in, out, wide, is_gated});
    check_codes(pool, kernels,
                {type, WeightForm::codes4, in, out, group, Type::f16, true, is_gated});
    check_codes(pool, kernels,
                {type, WeightForm::codes8, in, out, group, Type::f32, false, is_gated});
    check_codes(pool, kernels,
                {type, WeightForm::codes4, in, out, 128, Type::bf16, out % 4 == 0, is_gated});
    check_codes(pool, kernels, {type, WeightForm::codes8, in, out, 128, Type::f16, true, is_gated});
    CodedWeight floats{type, WeightForm::floats8, in, out, group, Type::f32, false, is_gated};
    floats.packed.order = nullptr;
    floats.packed.rounding = {RowType::floats, in > 100 ? 24 : 0, 0};
    check_codes(pool, kernels, std::move(floats));
    CodedWeight table{type, WeightForm::table4, in, out, group, Type::bf16, false, is_gated};
    for (int i = 0; i < 16; ++i) table.packed.table[i] = 0.5f * i - 2;
    check_codes(pool, kernels, std::move(table));
}

void check_level(Level level) {
    const Kernels kernels = kernels_for(level);
    Pool pool(2);
    for (int64_t in : kInputs)
        for (int64_t out : kOutputs)
            for (Type type : kTypes)
                for (bool is_gated : {false, true})
                    if (!is_gated || out % 2 == 0)
                        check_type(pool, kernels, type, in, out, is_gated);
}

}  // namespace
}  // namespace quire

int main() {
    using namespace quire;
    check_levels(check_level);
#if defined(QUIRE_HAS_EMULATED)
    if (refusal(Level::avx512).empty()) {
        check_emulated();
        std::printf("emulated avx512_bf16: passed\n");
    }
    if (refusal(Level::avx2).empty()) {
        check_emulated_vnni();
        std::printf("emulated avx_vnni: passed\n");
    }
#endif
    return 0;
}
