// What this machine gives at best: bytes read from memory, and multiply-adds on registers. No
// kernel is faster than these loops, so benchmarks print their shares of them.

#include "kernels/kernels.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Streams that a piece is read in. Four find more of a machine's memory channels busy than one,
// whose next page the hardware does not foresee: 25.4 instead of 23.5 GB/s with two Cascade Lake
// threads.
constexpr int64_t kStreams = 4;
constexpr int64_t kStreamBytes = kReadPiece / kStreams;

inline F32 sum_of_piece(const char* piece) {
    F32 sums[kStreams];
    for (F32& sum : sums) sum = splat(0);
    for (int64_t at = 0; at < kStreamBytes; at += 256)
        for (int64_t stream = 0; stream < kStreams; ++stream) {
            const auto* p = reinterpret_cast<const float*>(piece + stream * kStreamBytes + at);
#pragma GCC unroll 4
            for (int line = 0; line < 4; ++line)
                sums[line] = add(sums[line], load(p + line * kLanes));
        }
    return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

Status read(const ReadArgs& a, int64_t pieces, Pool& pool) {
    parallel(pool, pieces, [&](int64_t piece, int worker) {
        auto* sink = static_cast<float*>(scratch(pool, worker, kLanes * sizeof(float)));
        store(sink, sum_of_piece(static_cast<const char*>(a.data) + piece * kReadPiece));
    });
    return Status::ok;
}

// Independent sums that hide the latency of a multiply-add, as many as the registers hold.
#if defined(__AVX512F__)
constexpr int kChains = 14;
#elif defined(__AVX2__)
constexpr int kChains = 6;
#else
constexpr int kChains = 3;
#endif

// A way to multiply and add: `Sum step(Sum sum, Sum x)` does kOperations. Where a product is an
// instruction of its own, a factor is the sum, or the compiler would compute it once.
struct Float32 {
    using Sum = F32;
    static constexpr int kSums = kChains;
    static constexpr int64_t kOperations = 2 * kLanes;
    static Sum step(Sum sum, Sum x) { return fma(sum, x, sum); }
};

#if defined(__AVX512BF16__)
struct Bfloat16 : Float32 {
    static constexpr int64_t kOperations = 4 * kLanes;
    static Sum step(Sum sum, Sum x) {
        const auto pairs = reinterpret_cast<__m512bh>(x.v);
        return {_mm512_dpbf16_ps(sum.v, pairs, pairs)};
    }
};
#else
using Bfloat16 = Float32;  // widened first
#endif

#if defined(__AVX512VNNI__)
struct Int8 {
    using Sum = __m512i;
    static constexpr int kSums = kChains;
    static constexpr int64_t kOperations = 8 * kLanes;
    // In assembler, because GCC 12 copies the sums around the intrinsic: a third of the speed.
    static Sum step(Sum sum, Sum x) {
        __asm__("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(x));
        return sum;
    }
};
#elif defined(__AVXVNNI__)
struct Int8 {
    using Sum = __m256i;
    static constexpr int kSums = 2 * kChains;
    static constexpr int64_t kOperations = 4 * kLanes;
    static Sum step(Sum sum, Sum x) {
        __asm__("%{vex%} vpdpbusd %1, %1, %0" : "+x"(sum) : "x"(x));
        return sum;
    }
};
#elif defined(__AVX2__)
struct Int8 {
    using Sum = __m256i;
    static constexpr int kSums = 2 * kChains;
    static constexpr int64_t kOperations = 4 * kLanes;
    static Sum step(Sum sum, Sum x) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(sum, x), x));
    }
};
#else
using Int8 = Float32;
#endif

template <class Way>
inline void run_chains(const MultiplyArgs& a, typename Way::Sum* sink) {
    const auto* start = static_cast<const typename Way::Sum*>(a.start);
    typename Way::Sum sums[Way::kSums];
    for (int i = 0; i < Way::kSums; ++i) sums[i] = start[i];
    const typename Way::Sum x = start[Way::kSums];
    for (int64_t round = 0; round < a.rounds; ++round)
#pragma GCC unroll 16
        for (auto& sum : sums) sum = Way::step(sum, x);
    for (const auto& sum : sums) *sink = Way::step(*sink, sum);
}

template <class Way>
inline void run_tiles_of(const MultiplyArgs& a, int64_t tiles, Pool& pool) {
    using Sum = typename Way::Sum;
    static_assert((Way::kSums + 1) * sizeof(Sum) <= kStartBytes);
    parallel(pool, tiles, [&](int64_t, int worker) {
        run_chains<Way>(a, static_cast<Sum*>(scratch(pool, worker, sizeof(Sum))));
    });
    *a.operations = tiles * a.rounds * Way::kSums * Way::kOperations;
}

Status multiply_add(const MultiplyArgs& a, int64_t tiles, Pool& pool) {
    switch (a.operand) {
        case Operand::f32: run_tiles_of<Float32>(a, tiles, pool); break;
        case Operand::bf16: run_tiles_of<Bfloat16>(a, tiles, pool); break;
        case Operand::int8: run_tiles_of<Int8>(a, tiles, pool); break;
    }
    return Status::ok;
}

}  // namespace

void fill_limits(Kernels& table) {
    table.read = read;
    table.multiply_add = multiply_add;
}

}  // namespace quire::QUIRE_LEVEL
