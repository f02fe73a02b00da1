// Products of activations that keep their values with weights in int8 and int4.
//
// Some inputs of a panel at a time are widened to fp32 and then multiplied as fp32 weights are,
// with all rows of the chunk.

#include "kernels/element.hpp"
#include "kernels/float_product.hpp"
#include "kernels/kernels.hpp"
#include "kernels/product.hpp"
#include "kernels/quantized_panel.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

static_assert(kDepth % 128 == 0, "a pass begins at the beginning of a group");

// Bits kShift.. of 16 words as numbers, kBits of them.
#if defined(__AVX512F__)
struct Fields {
    __m512i words;
    explicit Fields(const uint8_t* from) : words(_mm512_loadu_si512(from)) {}
    template <int kShift, int kBits>
    F32 at() const {
        const __m512i mask = _mm512_set1_epi32((1 << kBits) - 1);
        return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, kShift), mask))};
    }
};
#elif defined(__AVX2__)
struct Fields {
    __m256i low, high;
    explicit Fields(const uint8_t* from)
        : low(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
          high(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1)) {}
    template <int kShift, int kBits>
    F32 at() const {
        const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
        return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(low, kShift), mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(high, kShift), mask))};
    }
};
#else
struct Fields {
    uint32_t words[kLanes];
    explicit Fields(const uint8_t* from) { __builtin_memcpy(words, from, sizeof words); }
    template <int kShift, int kBits>
    F32 at() const {
        float lanes[kLanes];
        for (int i = 0; i < kLanes; ++i)
            lanes[i] = static_cast<float>(words[i] >> kShift & ((1u << kBits) - 1));
        return load(lanes);
    }
};
#endif

// What a stored number means: (field - zero) * scale. The zero is a power of two, so that its
// product with the scale is exact and the whole is rounded once.
struct Meaning {
    F32 scale, offset;
    Meaning(F32 of, float zero) : scale(of), offset(mul(of, splat(-zero))) {}
    F32 operator()(F32 field) const { return fma(field, scale, offset); }
};

// Four inputs of 16 outputs, kPanel apart.
template <int kShift, int kBits>
inline void widen_four(const Fields& fields, const Meaning& meaning, float* to) {
    store(to, meaning(fields.at<kShift, kBits>()));
    store(to + kPanel, meaning(fields.at<kShift + 8, kBits>()));
    store(to + 2 * kPanel, meaning(fields.at<kShift + 16, kBits>()));
    store(to + 3 * kPanel, meaning(fields.at<kShift + 24, kBits>()));
}

// Inputs first..stop-1 of a panel, both multiples of 4, as [input][kPanel].
inline void widen_bytes(const uint8_t* panel, const float* scales, int64_t first, int64_t stop,
                        float* to) {
    const Meaning low(load(scales), 128), high(load(scales + kLanes), 128);
    const uint8_t* from = panel + first * kPanel;
    for (int64_t k = first; k < stop; k += kFour, from += kByteLine, to += kFour * kPanel) {
        __builtin_prefetch(from + kPrefetch);
        __builtin_prefetch(from + kPrefetch + kLine);
        widen_four<0, 8>(Fields(from), low, to);
        widen_four<0, 8>(Fields(from + kLine), high, to + kLanes);
    }
}

inline void widen_nibbles(const PackedWeight& w, const uint8_t* panel, int64_t first, int64_t stop,
                          float* to) {
    const uint8_t* group = panel + first / w.group * group_bytes(w.group);
    for (int64_t k = first; k < stop; group += group_bytes(w.group)) {
        const auto* scales = reinterpret_cast<const BF16*>(group + w.group * kPanel / 2);
        const Meaning low(load(scales), 8), high(load(scales + kLanes), 8);
        for (const uint8_t* from = group; k < stop && from < group + w.group * kPanel / 2;
             k += kFour, from += kLine, to += kFour * kPanel) {
            __builtin_prefetch(from + kPrefetch);
            const Fields fields(from);
            widen_four<0, 4>(fields, low, to);
            widen_four<4, 4>(fields, high, to + kLanes);
        }
    }
}

class DequantizedProduct {
   public:
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        return FloatRows<float>::num_bytes(a.weight, rows);
    }

    static constexpr int kMostPanels = 1;

    DequantizedProduct(const LinearArgs& a, int64_t rows, void* memory)
        : a_(a), weight_(a.weight), x_(a.weight, rows, memory) {}

    int64_t segments() const { return x_.segments; }

    void prepare(int64_t row, int64_t token) const {
        with_type(weight_.type,
                  [&](auto type) { x_.prepare(row, row_of<decltype(type)>(a_.x, token, 0)); });
    }

    template <int>
    void multiply(int64_t panel, int64_t segment, float* sums, int64_t stride) const {
        const auto* from =
            static_cast<const uint8_t*>(weight_.panels) + panel * panel_bytes(weight_);
        alignas(64) float wide[kDepth * kPanel];
        const auto widened = [&](int64_t pair, int64_t count) -> const float* {
            const int64_t stop = round_up((pair + count) * 2, kFour);
            if (is_int4(weight_))
                widen_nibbles(weight_, from, pair * 2, stop, wide);
            else
                widen_bytes(from, weight_.scales + panel * kPanel, pair * 2, stop, wide);
            return wide;
        };
        x_.multiply<1>(segment, sums, stride, {}, widened);
    }

    F32 concluded(int64_t, F32 sum) const { return sum; }

   private:
    const LinearArgs& a_;
    const PackedWeight& weight_;
    const FloatRows<float> x_;
};

Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    return multiply<DequantizedProduct>(a, tokens, pool);
}

Status grouped(const GroupedArgs& a, int64_t, Pool& pool) {
    return multiply_groups<DequantizedProduct>(a, pool);
}

}  // namespace

void fill_dequantized(Kernels& table) { table.linear_dequantized = {linear, grouped}; }

}  // namespace quire::QUIRE_LEVEL
