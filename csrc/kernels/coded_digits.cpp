// Products of activations in 16 bits with weights in codes of four or eight bits, in whole numbers:
// the activations of a group are digits (digits.hpp), and their products with the codes are sums of
// integers, one for each digit, which nothing is lost of.
//
// The order of an output's additions in a segment, for any number of rows: what the digits of a
// group make together, the lower two as an integer, times the step of its inputs and the scale of
// its weights, on top of those of the groups before it.

#include "kernels/coded_panel.hpp"
#include "kernels/digits.hpp"
#include "kernels/kernels.hpp"
#include "kernels/product.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Rows of a register block, and how many vectors of a panel there is room for with the sums of so
// many rows and panels.
#if defined(__AVX512F__)
constexpr int kDigitRows = 4;
constexpr int vectors_of(int M, int P) { return M * P <= 4 ? 2 : 1; }
#else
#if defined(QUIRE_AVX_VNNI)
constexpr int kDigitRows = 2;
#else
constexpr int kDigitRows = 1;
#endif
constexpr int vectors_of(int, int) { return 1; }
#endif

#if defined(__AVX512F__)
// lower + 256 * upper.
inline Integers joined(Integers lower, Integers upper) {
    return {_mm512_add_epi32(lower.v, _mm512_slli_epi32(upper.v, 8))};
}
// The zero points of 16 outputs times a number of 16 bits.
inline Integers zeros_times(const uint8_t* zeros, int32_t factor) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    return {_mm512_madd_epi16(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(factor))};
}
#else
inline __m256i joined(__m256i lower, __m256i upper) {
    return _mm256_add_epi32(lower, _mm256_slli_epi32(upper, 8));
}
inline Integers joined(Integers lower, Integers upper) {
    return {joined(lower.low, upper.low), joined(lower.high, upper.high)};
}
inline Integers zeros_times(const uint8_t* zeros, int32_t factor) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    const __m256i by = _mm256_set1_epi32(factor);
    return {_mm256_madd_epi16(_mm256_cvtepu8_epi32(bytes), by),
            _mm256_madd_epi16(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), by)};
}
#endif

// sums += the products of a word of each output, V vectors of them, with J rows of digits, kDepth
// apart.
template <int kBits, int J, int V>
inline void add_word(Integers (&sums)[J][V], const int8_t* x, const Bytes (&word)[V]) {
    Bytes lanes[V];
#pragma GCC unroll 2
    for (int half = 0; half < 8 / kBits; ++half) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            lanes[v] = kBits == 8  ? word[v]
                       : half == 0 ? low_nibbles(word[v])
                                   : high_nibbles(word[v]);
#pragma GCC unroll 16
        for (int j = 0; j < J; ++j) {
            const Four four = splat_four(x + j * kDepth + half * 4);
            for (int v = 0; v < V; ++v) {
                if constexpr (kBits == 4)
                    sums[j][v] = add_nibbles(sums[j][v], lanes[v], four);
                else
                    sums[j][v] = add_bytes(sums[j][v], lanes[v], four);
            }
        }
    }
}

// sums += the products of some words of each of P panels, with J rows of digits of M rows.
template <int M, int kBits, int J, int V, int P>
inline void add_words(Integers (&sums)[P][J][V], const int8_t* x, const uint8_t* w, int64_t words,
                      int64_t apart, int64_t ahead, bool is_read_once) {
    for (int64_t i = 0; i < words; ++i, w += kWordLine, x += 32 / kBits) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            Bytes word[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                const uint8_t* here = w + p * apart + v * kLine;
                word[v] = load_bytes(here);
                fetch_weights<M>(here + ahead, is_read_once);
            }
            add_word<kBits>(sums[p], x, word);
        }
    }
}

#if !defined(__AVX512F__) && !defined(QUIRE_AVX_VNNI)
constexpr int64_t kNarrowWords = kNarrow * 4 / 32;

// The same for J digits of one row, kNarrow inputs at a time in 16 bits; vector after vector, since
// there are registers for the narrow sums of one.
template <int J, int V>
inline void add_narrow(Integers (*sums)[V], const int8_t* x, const uint8_t* w, int64_t words,
                       int64_t ahead, bool is_read_once) {
    for (int64_t first = 0; first < words; first += kNarrowWords) {
        const int64_t left = words - first, count = left < kNarrowWords ? left : kNarrowWords;
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            Integers narrow[1][J][1];
            each_sum<1, J, 1>([&](int, int j, int) { narrow[0][j][0] = splat_int(0); });
            add_words<1, 4>(narrow, x + first * 8, w + first * kWordLine + v * kLine, count, 0,
                            ahead, is_read_once);
            each_sum<1, J, 1>(
                [&](int, int j, int) { sums[j][v] = widened(sums[j][v], narrow[0][j][0]); });
        }
    }
}

// sums += the products of words, kNarrowWords at most, that have a bit in `chosen`, with a digit.
template <int V>
inline void add_chosen(Integers (&sums)[V], const int8_t* x, const uint8_t* w, uint32_t chosen) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
        Integers narrow[1][1] = {{splat_int(0)}};
        for (uint32_t left = chosen; left != 0; left &= left - 1) {
            const int64_t i = __builtin_ctz(left);
            const Bytes word[1] = {load_bytes(w + i * kWordLine + v * kLine)};
            add_word<4>(narrow, x + i * 8, word);
        }
        sums[v] = widened(sums[v], narrow[0][0]);
    }
}
#endif

// Rows as they are multiplied, from one of them and a group on: digits [run of kDepth inputs][row]
// [digit][kDepth]; steps [group][row]; starts [group][row][kStarts], the digits' sums times what is
// subtracted from all codes, or times -1 where each output has its zero point, and after them,
// where sums are narrow, a bit for each word of inputs of which any has a lowest digit.
constexpr int kStarts = kDigits + 1;
struct DigitRows {
    int8_t* digits;
    float* steps;
    int32_t* starts;

    // To the next group of a run, one of `inputs` inputs.
    void move(int64_t inputs, int64_t rows) {
        digits += inputs;
        steps += rows;
        starts += rows * kStarts;
    }
};

// sums = (is_first ? 0 : sums) + the products of a group's words with M rows, V vectors of each of
// P panels; weights are fetched that lie `ahead` bytes further on.
template <int M, int V, int P, int kBits, bool kHasZeros>
inline void add_group(const DigitRows& x, const GroupAt& at, int vector, int64_t words,
                      int64_t ahead, float* sums, int64_t stride, bool is_first) {
    constexpr int J = M * kDigits;
    if (M == 1 && P == 1 && at.is_read_once && vector == 0) {
        fetch_weights<M>(at.scales + ahead, true);
        if (kHasZeros) fetch_weights<M>(at.zeros + ahead, true);
    }
    F32 scales[P][V];
    with_type(at.scale_type, [&](auto type) {
        each_sum<P, 1, V>([&](int p, int, int v) {
            const char* of_panel = at.scales + p * at.apart;
            scales[p][v] =
                load(reinterpret_cast<const decltype(type)*>(of_panel) + (vector + v) * kLanes);
        });
    });
    Integers acc[P][J][V];
    each_sum<P, J, V>([&](int p, int j, int v) {
        const uint8_t* zeros = at.zeros + p * at.apart + (vector + v) * kLanes;
        const int32_t start = x.starts[j / kDigits * kStarts + j % kDigits];
        acc[p][j][v] = kHasZeros ? zeros_times(zeros, start) : splat_int(start);
    });
    const uint8_t* w = at.codes + vector * kLine;
#if defined(__AVX512F__) || defined(QUIRE_AVX_VNNI)
    add_words<M, kBits>(acc, x.digits, w, words, at.apart, ahead, at.is_read_once);
#else
    static_assert(M == 1 && P == 1 && kBits == 4);
    const uint32_t lowest = x.starts[kDigits];
    if (__builtin_popcount(lowest) <= kNarrowWords) {
        add_narrow<kDigits - 1>(acc[0] + 1, x.digits + kDepth, w, words, ahead, at.is_read_once);
        add_chosen(acc[0][0], x.digits, w, lowest);
    } else {
        add_narrow<kDigits>(acc[0], x.digits, w, words, ahead, at.is_read_once);
    }
#endif
    each_sum<P, M, V>([&](int p, int r, int v) {
        const int64_t lane = (vector + v) * kLanes;
        const int j = r * kDigits;
        float* sum = sums + p * kPanel + r * stride + lane;
        const F32 lower = to_float(joined(acc[p][j][v], acc[p][j + 1][v]));
        const F32 whole = fma(to_float(acc[p][j + 2][v]), splat(65536), lower);
        const F32 before = is_first ? splat(0) : load(sum);
        store(sum, fma(mul(whole, splat(x.steps[r])), scales[p][v], before));
    });
}

// How the inputs of a segment are cut.
struct DigitCut {
    int64_t segments, in, runs, groups;
    int64_t per_run;  // groups

    explicit DigitCut(const PackedWeight& w)
        : segments(w.segments),
          in(w.in / segments),
          runs((in + kDepth - 1) / kDepth),
          groups((in + w.group - 1) / w.group),
          per_run(kDepth / w.group) {}

    int64_t digit_bytes() const { return segments * runs * kDigits * kDepth; }  // of a row
};

template <int kBits, bool kHasZeros>
class DigitProduct {
    static constexpr int64_t kInputs = 32 / kBits;  // of a word

   public:
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        const DigitCut cut(a.weight);
        const int64_t numbers = cut.segments * cut.groups * (1 + kStarts);
        return rows * (cut.digit_bytes() + numbers * sizeof(float));
    }

    static constexpr int kMostPanels = kNibblePanels;

    DigitProduct(const LinearArgs& a, int64_t rows, void* memory)
        : a_(a), panel_(a.weight), cut_(a.weight), rows_(rows) {
        x_.digits = static_cast<int8_t*>(memory);
        x_.steps = reinterpret_cast<float*>(x_.digits + rows * cut_.digit_bytes());
        x_.starts = reinterpret_cast<int32_t*>(x_.steps + cut_.segments * cut_.groups * rows);
    }

    int64_t segments() const { return cut_.segments; }

    void prepare(int64_t row, int64_t token) const {
        with_type(a_.weight.type, [&](auto type) {
            const auto* from = row_of<decltype(type)>(a_.x, token, 0);
            for (int64_t s = 0; s < segments(); ++s)
                for (int64_t run = 0; run < cut_.runs; ++run) prepare_run(row, s, run, from);
        });
    }

    template <int P>
    void multiply(int64_t panel, int64_t segment, float* sums, int64_t stride) const {
        constexpr int kHeight = P > 1 ? kFewRows : kDigitRows;
        const int64_t blocks = (rows_ + kHeight - 1) / kHeight;
        GroupAt at(a_.weight, panel_, panel, segment * cut_.groups, rows_);
        for (int64_t run = 0; run < cut_.runs; ++run, at.move(panel_, cut_.per_run))
            for (int64_t block = 0, row = 0; block < blocks; ++block) {
                const int64_t next = (block + 1) * rows_ / blocks;
                multiply_rows<kHeight, P>(next - row, row, panel, at, segment, run,
                                          sums + row * stride, stride);
                row = next;
            }
    }

    F32 concluded(int64_t, F32 sum) const { return sum; }

   private:
    // The rows from `row` on, at a run of a segment.
    DigitRows rows_at(int64_t row, int64_t segment, int64_t run) const {
        const int64_t at = (segment * cut_.groups + run * cut_.per_run) * rows_ + row;
        return {x_.digits + ((segment * cut_.runs + run) * rows_ + row) * kDigits * kDepth,
                x_.steps + at, x_.starts + at * kStarts};
    }

    int64_t inputs_of(int64_t run) const {
        const int64_t left = cut_.in - run * kDepth;
        return left < kDepth ? left : kDepth;
    }

    // The groups of a run of a row; digits beyond the last input are zeros.
    template <class E>
    void prepare_run(int64_t row, int64_t segment, int64_t run, const E* from) const {
        constexpr int64_t kRoom = kDepth + kLanes;  // for the last group's whole vectors
        constexpr int32_t kBelow = kHasZeros ? 1 : 1 << (kBits - 1);
        int8_t digits[kDigits * kRoom] = {};
        const int64_t inputs = inputs_of(run), group = panel_.group;
        const DigitRows first = rows_at(row, segment, run);
        DigitRows to = first;
        for (int64_t k = 0; k < inputs; k += group, to.move(group, rows_)) {
            const int64_t count = inputs - k < group ? inputs - k : group;
            float values[kDepth];
            read(segment * cut_.in + run * kDepth + k, count, from, values);
            const Steps steps = digit_steps(range_of(values, count));
            *to.steps = steps.scale;
            store_digits<kBits>(values, count, steps.inverse, digits + k, kRoom, to.starts);
            for (int d = 0; d < kDigits; ++d) to.starts[d] *= -kBelow;
            if constexpr (kNarrow > 0) to.starts[kDigits] = words_of(digits + k, count);
        }
        for (int d = 0; d < kDigits; ++d)
            __builtin_memcpy(first.digits + d * kDepth, digits + d * kRoom, kDepth);
    }

    // A bit for each word of inputs whose digits are not all zeros.
    static uint32_t words_of(const int8_t* digits, int64_t count) {
        uint32_t words = 0;
        for (int64_t i = 0; i * kInputs < count; ++i) {
            uint64_t of_word = 0;
            __builtin_memcpy(&of_word, digits + i * kInputs, kInputs);
            words |= uint32_t{of_word != 0} << i;
        }
        return words;
    }

    // Inputs of the weight as fp32, filled up with zeros to whole vectors.
    template <class E>
    void read(int64_t first, int64_t count, const E* from, float* to) const {
        E reordered[kDepth];
        if (const int64_t* order = a_.weight.order; order != nullptr)
            for (int64_t i = 0; i < count; ++i) reordered[i] = from[order[first + i]];
        const E* inputs = a_.weight.order != nullptr ? reordered : from + first;
        each(count, [&](auto lanes, int64_t i) { store(to + i, get(lanes, inputs + i)); });
    }

    // The height becomes a constant.
    template <int M, int P>
    void multiply_rows(int64_t height, int64_t row, int64_t panel, GroupAt at, int64_t segment,
                       int64_t run, float* sums, int64_t stride) const {
        if (height != M) {
            if constexpr (M > 1)
                multiply_rows<M - 1, P>(height, row, panel, at, segment, run, sums, stride);
            return;
        }
        // A weight is read once for one row, and then from its beginning to its end; for several
        // it is in the nearest cache, and sums that stay in registers count.
        if constexpr (kNarrow > 0)
            if (rows_ == 1)
                return multiply_groups<M, kPanel / kLanes, P>(row, panel, at, segment, run, sums,
                                                              stride);
        multiply_groups<M, vectors_of(M, P), P>(row, panel, at, segment, run, sums, stride);
    }

    // V vectors of each panel at a time.
    template <int M, int V, int P>
    void multiply_groups(int64_t row, int64_t panel, GroupAt at, int64_t segment, int64_t run,
                         float* sums, int64_t stride) const {
        const int64_t inputs = inputs_of(run), group = panel_.group;
        const auto* start = static_cast<const uint8_t*>(a_.weight.panels) + panel * panel_.bytes();
        DigitRows x = rows_at(row, segment, run);
        for (int64_t k = 0; k < inputs; k += group, x.move(group, rows_), at.move(panel_, 1)) {
            const int64_t count = inputs - k < group ? inputs - k : group;
            // where a single stream has the nearest cache for itself, farther ahead
            const int64_t far = at.is_read_once ? 4 * kAhead : kAhead;
            const int64_t offset = at.codes - start + far;  // of what is fetched, in its panel
            const int64_t ahead = far + (offset < at.apart ? 0 : (P - 1) * at.apart);
            for (int v = 0; v < kPanel / kLanes; v += V)
                add_group<M, V, P, kBits, kHasZeros>(x, at, v, (count + kInputs - 1) / kInputs,
                                                     ahead, sums, stride, run + k == 0);
        }
    }

    const LinearArgs& a_;
    const CodedPanel panel_;
    const DigitCut cut_;
    const int64_t rows_;
    DigitRows x_;
};

template <int kBits>
Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    return a.weight.has_zeros ? multiply<DigitProduct<kBits, true>>(a, tokens, pool)
                              : multiply<DigitProduct<kBits, false>>(a, tokens, pool);
}

template <int kBits>
Status grouped(const GroupedArgs& a, int64_t, Pool& pool) {
    return a.product.weight.has_zeros ? multiply_groups<DigitProduct<kBits, true>>(a, pool)
                                      : multiply_groups<DigitProduct<kBits, false>>(a, pool);
}

}  // namespace

void fill_coded_digits(Kernels& table) {
    table.linear_digits4 = {linear<4>, grouped<4>};
#if defined(__AVX512VNNI__) || defined(QUIRE_AVX_VNNI)
    table.linear_digits8 = {linear<8>, grouped<8>};
    table.digit_group = 0;
#else
    table.digit_group = 32;  // the smallest that was measured
#endif
}

}  // namespace quire::QUIRE_LEVEL
