// Register blocks: a few rows times the lanes of a panel, two inputs at a time.
//
// A panel holds for each pair of inputs (k, k + 1) kPanel lanes: bf16 as (k, k + 1) side by side in
// every lane, which is how vdpbf16ps takes them and cheap to widen; other types as all lanes of k,
// then all of k + 1. An odd last input has a partner of zeros.
#pragma once

#include "kernels/dots.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kPanel = kPanelWidth;

// The panels of a weight.
inline int64_t num_panels(const PackedWeight& w) {
    const int64_t halves = w.is_gated ? 2 : 1;
    return (w.out / halves + kPanel - 1) / kPanel * halves;
}

// The outputs that one of them has.
struct Lanes {
    int64_t begin, end;
};

struct PanelOutputs {
    int64_t first, count;

    PanelOutputs(const PackedWeight& w, int64_t panel) {
        const int64_t halves = w.is_gated ? 2 : 1, width = w.out / halves;
        const int64_t lane = panel / halves * kPanel;
        first = panel % halves * width + lane;
        count = width - lane < kPanel ? width - lane : kPanel;
    }

    // The lanes of those among `wanted`; none: begin is at the end.
    Lanes lanes_of(const Outputs& wanted) const {
        const int64_t begin = wanted.first - first, end = begin + wanted.count;
        const int64_t from = begin < 0 ? 0 : begin, to = end < count ? end : count;
        return {from < to ? from : to, to};
    }
};

// The panels that have some of the wanted outputs; of a gated weight, all between them.
struct Panels {
    int64_t first, count;

    Panels(const PackedWeight& w, const Outputs& wanted) {
        const int64_t halves = w.is_gated ? 2 : 1, width = w.out / halves;
        const int64_t last = wanted.first + (wanted.count > 0 ? wanted.count - 1 : 0);
        const bool is_of_one = wanted.first / width == last / width;
        first = is_of_one ? wanted.first % width / kPanel * halves : 0;
        count = (is_of_one ? (last % width / kPanel + 1) * halves : num_panels(w)) - first;
    }
};

// Inputs whose products are added into fresh sums: 16 KiB of fp32 weights, half of a first-level
// cache.
constexpr int64_t kDepth = 128;

// Rows and vectors of a register block: their sums fill most of the registers.
#if defined(__AVX512F__)
constexpr int kRowBlock = 12;
constexpr int kVectors = 2;
#elif defined(__AVX2__)
constexpr int kRowBlock = 6;
constexpr int kVectors = 1;
#else
constexpr int kRowBlock = 2;
constexpr int kVectors = 1;
#endif

// How many panels are read side by side for one row.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPanelsOfOneRow = 2;
#else
constexpr int kPanelsOfOneRow = 4;
#endif

// Whether a block of M rows and P panels is as wide as a panel, so that panels are read in one
// pass: for one row, where there are registers.
constexpr bool is_wide(int M, int P) {
    return kVectors * kLanes == kPanel || (M == 1 && P <= kPanelsOfOneRow && kPanelsOfOneRow < 4);
}

// Up to so many rows, reading weights takes longer than multiplying with them, and several panels
// are read side by side: four streams keep more of a machine's memory channels busy than one, whose
// next page the hardware does not foresee. Where it does, weights are streamed (PackedWeight).
constexpr int kFewRows = 2;

// Where an input of a lane lies in its panel.
template <class E>
inline int64_t place_of(int64_t lane, int64_t input) {
    constexpr bool is_paired = __is_same(E, BF16);
    const int64_t odd = input % 2;
    return (input - odd) * kPanel + (is_paired ? lane * 2 + odd : odd * kPanel + lane);
}

// The weights of 16 lanes for two inputs, in fp32.
struct TwoInputs {
    F32 even, odd;
};

// Whether so many sums leave no other register for long.
constexpr bool fill_registers(int sums) { return sums >= kRowBlock * kVectors - 1; }

// Those of the first or of the second of a pair's inputs, to be multiplied into so many sums.
template <int kOdd, int kSums, class E>
inline F32 load_input(const E* pair, int vector) {
    return load(pair + kOdd * kPanel + vector * kLanes);
}
#if defined(__AVX512F__)
template <int kOdd, int kSums>
inline F32 load_input(const BF16* pair, int vector) {
    const __m512i both = _mm512_loadu_si512(pair + vector * 2 * kLanes);
    const __m512i mask = _mm512_set1_epi32(0xffff0000);
    return {_mm512_castsi512_ps(kOdd ? _mm512_and_si512(both, mask) : _mm512_slli_epi32(both, 16))};
}
#elif defined(__AVX2__)
alignas(32) inline constexpr uint32_t kUpperHalves[8] = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

template <int kOdd, int kSums>
inline __m256 input_of(__m256i both) {
    const auto& mask = *reinterpret_cast<const __m256i*>(kUpperHalves);
    if constexpr (!kOdd)
        both = _mm256_slli_epi32(both, 16);
    else if constexpr (fill_registers(kSums))  // GCC would put the mask into one, and a sum aside
        __asm__("vpand %1, %0, %0" : "+x"(both) : "m"(mask));
    else
        both = _mm256_and_si256(both, mask);
    return _mm256_castsi256_ps(both);
}
template <int kOdd, int kSums>
inline F32 load_input(const BF16* pair, int vector) {
    const auto* at = reinterpret_cast<const __m256i*>(pair + vector * 2 * kLanes);
    return {input_of<kOdd, kSums>(_mm256_loadu_si256(at)),
            input_of<kOdd, kSums>(_mm256_loadu_si256(at + 1))};
}
#else
template <int kOdd, int kSums>
inline F32 load_input(const BF16* pair, int vector) {
    const Words both = load_bits<Words>(pair + vector * 2 * kLanes);
    return {of_bits(kOdd ? both & all(0xffff0000u) : both << 16)};
}
#endif

// sum += a * b, in the register of the sum. Where sums fill the registers, GCC would put the result
// of its own fma elsewhere, and keep sums in memory: a third of the speed.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m256 add_product(__m256 sum, __m256 a, __m256 b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
inline F32 add_product(F32 sum, F32 a, F32 b) {
    return {add_product(sum.low, a.low, b.low), add_product(sum.high, a.high, b.high)};
}
#else
inline F32 add_product(F32 sum, F32 a, F32 b) { return fma(a, b, sum); }
#endif

// Loads stay on their side of this, or those of all rows come first and take the registers of sums.
template <int kSums>
inline void stay_in_order() {
    if constexpr (fill_registers(kSums)) __asm__ volatile("" ::: "memory");
}

// How weights of type E are multiplied: the type that rows are prepared in, and one step.
template <class E>
struct Dots {
    using X = float;

    // sums += x[row][k] * w[k] + x[row][k + 1] * w[k + 1], k first.
    template <int M, int V>
    static void add_pair(F32 (&sums)[M][V], const X* x, const E* pair, int vector) {
        constexpr bool kIsFull = fill_registers(M * V);
        F32 even[V], odd[V];
        for (int v = 0; v < V; ++v) even[v] = load_input<0, M * V>(pair, vector + v);
        if constexpr (!kIsFull)
            for (int v = 0; v < V; ++v) odd[v] = load_input<1, M * V>(pair, vector + v);
        add_input(sums, x, even);
        if constexpr (kIsFull)
            for (int v = 0; v < V; ++v) odd[v] = load_input<1, M * V>(pair, vector + v);
        add_input(sums, x + 1, odd);
    }

   private:
    template <int M, int V>
    static void add_input(F32 (&sums)[M][V], const X* x, const F32 (&w)[V]) {
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
            const F32 here = splat(x[r * kDepth]);
            for (int v = 0; v < V; ++v) sums[r][v] = add_product(sums[r][v], here, w[v]);
            stay_in_order<M * V>();
        }
    }
};

#if defined(QUIRE_BF16_DOTS)
template <>
struct Dots<BF16> {
    using X = BF16;

    template <int M, int V>
    static void add_pair(F32 (&sums)[M][V], const X* x, const BF16* pair, int vector) {
        __m512i w[V];
        for (int v = 0; v < V; ++v) w[v] = _mm512_loadu_si512(pair + (vector + v) * 2 * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
            const __m512i here = splat_pair(x + r * kDepth);
            for (int v = 0; v < V; ++v) sums[r][v] = add_dots(sums[r][v], w[v], here);
        }
    }
};
#endif

// Far enough ahead for the memory, near enough to be still in the cache: 32 pairs of bf16.
constexpr int64_t kPrefetchBytes = 4096;

// Fetch a line of weights for M rows. Those that are read once in a step, for a single row, and are
// more than caches hold, are the first to leave them again.
template <int M>
inline void fetch_weights(const void* line, bool is_read_once) {
    if (M == 1 && is_read_once)
        __builtin_prefetch(line, 0, 0);
    else
        __builtin_prefetch(line);
}

// Bytes that a pass over some weights fetches, a line now and then: what memory sends while other
// rows are multiplied with what is there already.
struct Fetch {
    const char* next;
    const char* end;

    template <int M>
    void line(bool is_read_once) {
        if (next >= end) return;
        fetch_weights<M>(next, is_read_once);
        next += 64;
    }
};

// What each of some passes over the same weights fetches: its share of those that follow them; a
// single pass, which waits for the memory itself, what it needs soon.
struct Fetches {
    const char* first;
    int64_t share;

    Fetches(const void* weights, int64_t bytes, int64_t passes, int64_t soon)
        : first(static_cast<const char*>(weights) + (passes == 1 ? soon : bytes)),
          share((bytes / 64 + passes - 1) / passes * 64) {}

    Fetch of(int64_t pass) const { return {first + pass * share, first + (pass + 1) * share}; }
};

// Panels that are multiplied side by side, so that several streams are read: how far their weights
// lie apart, in elements; their sums lie kPanel apart. is_read_once: see fetch_weights.
struct Apart {
    int64_t weights;
    bool is_read_once = false;
};

// body(panel, row, vector) for every sum of a register block. Unrolled to the end, or the sums
// would not be in registers.
template <int P, int M, int V, class Body>
inline void each_sum(const Body& body) {
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) body(p, r, v);
}

// For M rows of x (kDepth apart) and V vectors of each of P panels: sums = (is_first ? 0 : sums) +
// the products of these inputs.
template <int M, int V, int P, class E>
inline void multiply_block(const typename Dots<E>::X* x, const E* w, int vector, int64_t pairs,
                           Fetch fetch, float* sums, int64_t stride, const Apart& apart,
                           bool is_first) {
    F32 acc[P][M][V];
    each_sum<P, M, V>([&](int p, int r, int v) { acc[p][r][v] = splat(0); });
    for (int64_t pair = 0; pair < pairs; ++pair) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const E* at = w + p * apart.weights + pair * 2 * kPanel;
            const char* ahead = reinterpret_cast<const char*>(at) + kPrefetchBytes;
#pragma GCC unroll 4
            for (int64_t line = 0; line < kPanel * V * int64_t(sizeof(E)); line += 64) {
                if constexpr (P == 1)
                    fetch.line<M>(apart.is_read_once);
                else
                    fetch_weights<M>(ahead + vector * kPanel * sizeof(E) + line,
                                     apart.is_read_once);
            }
            Dots<E>::template add_pair<M, V>(acc[p], x + pair * 2, at, vector);
        }
    }
    each_sum<P, M, V>([&](int p, int r, int v) {
        float* sum = sums + p * kPanel + r * stride + (vector + v) * kLanes;
        store(sum, is_first ? acc[p][r][v] : add(load(sum), acc[p][r][v]));
    });
}

}  // namespace quire::QUIRE_LEVEL
