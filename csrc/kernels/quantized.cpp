// Products of int8 activations with weights in int8 or int4, and the packing of such weights.
//
// A row of x has one scale. A weight in int8 has one per output: y = x_scale * w_scale * (a sum of
// integers). A weight in int4 has one per output and group of inputs: the groups' sums are
// integers, and they are added in fp32, in order of the groups.

#include "kernels/element.hpp"
#include "kernels/integers.hpp"
#include "kernels/kernels.hpp"
#include "kernels/product.hpp"
#include "kernels/quantize.hpp"
#include "kernels/quantized_panel.hpp"
#include "kernels/scan.hpp"
#include "kernels/transpose.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Inputs of a row that lie side by side when it is prepared. All groups divide it.
constexpr int64_t kRun = 256;

// How a row is cut for a product. Whole numbers have the same sum in every order, so the segments
// of an int8 weight do not matter; all of its inputs are one group.
struct Cut {
    int64_t segments;
    int64_t in;      // inputs of a segment
    int64_t groups;  // of a segment
    int64_t group;   // inputs of a group
    int64_t runs;    // of a segment, of kRun inputs each

    explicit Cut(const LinearArgs& a)
        : segments(is_int4(a.weight) ? a.weight.segments : 1),
          in(a.weight.in / segments),
          groups(is_int4(a.weight) ? (in + a.weight.group - 1) / a.weight.group : 1),
          group(is_int4(a.weight) ? a.weight.group : round_up(in, kFour)),
          runs((padded() + kRun - 1) / kRun) {}

    int64_t padded() const { return groups * group; }
};

// Rows that are prepared: bytes [segment][run of kRun inputs][row][kRun], so that the rows of a
// register block lie at constant distances; what the sum of a group begins with, [segment][group]
// [row], since stored weights are too large by a constant; scales [row].
struct Prepared {
    int64_t rows;
    int8_t* bytes;
    int32_t* starts;
    float* scales;

    Prepared(const Cut& cut, int64_t num_rows, void* memory)
        : rows(num_rows),
          bytes(static_cast<int8_t*>(memory)),
          starts(reinterpret_cast<int32_t*>(bytes + cut.segments * cut.runs * kRun * rows)),
          scales(reinterpret_cast<float*>(starts + cut.segments * cut.groups * rows)) {}

    static size_t num_bytes(const Cut& cut, int64_t rows) {
        return rows * (cut.segments * (cut.runs * kRun + cut.groups * 4) + 4);
    }
    int8_t* segment(const Cut& cut, int64_t s) const { return bytes + s * cut.runs * kRun * rows; }
};

// A segment of the prepared rows from one on, and of the weights. If it is all there is, the scales
// of the rows: its sums are whole. weight_scales: of int8.
struct Segment {
    const int8_t* bytes;
    const int32_t* starts;
    const float* scales;
    int64_t rows;
    int64_t in;
    int64_t group;
    const uint8_t* weights;
    const float* weight_scales;

    Segment from_row(int64_t row) const {
        Segment moved = *this;
        moved.bytes += row * kRun;
        moved.starts += row;
        if (scales != nullptr) moved.scales += row;
        return moved;
    }
};

inline F32 scaled(Integers sum, const float* weight_scales, float scale) {
    return mul(mul(to_float(sum), load(weight_scales)), splat(scale));
}

// sums of M rows and V vectors for P panels of int8: of int32, unless they are concluded.
template <int M, int V, int P>
inline void multiply_bytes(const Segment& x, int vector, float* sums, int64_t stride, Apart apart) {
    Integers acc[P][M][V];
    each_sum<P, M, V>([&](int p, int r, int v) { acc[p][r][v] = splat_int(x.starts[r]); });
    const int8_t* run = x.bytes;
    const uint8_t* w = x.weights;
    for (int64_t k = 0; k < x.in; k += kRun, run += x.rows * kRun) {
        const int64_t left = round_up(x.in - k, kFour), count = left < kRun ? left : kRun;
        for (int64_t i = 0; i < count; i += kFour, w += kByteLine) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                Bytes lanes[V];
#pragma GCC unroll 2
                for (int v = 0; v < V; ++v) {
                    const uint8_t* at = w + p * apart.weights + (vector + v) * kByteLine / 2;
                    fetch_weights<M>(at + kPrefetch, apart.is_read_once);
                    lanes[v] = load_bytes(at);
                }
#pragma GCC unroll 16
                for (int r = 0; r < M; ++r) {
                    const Four four = splat_four(run + i + r * kRun);
                    for (int v = 0; v < V; ++v)
                        acc[p][r][v] = add_bytes(acc[p][r][v], lanes[v], four);
                }
            }
        }
    }
    each_sum<P, M, V>([&](int p, int r, int v) {
        const int64_t lane = (vector + v) * kLanes;
        float* to = sums + p * kPanel + r * stride + lane;
        if (x.scales == nullptr)
            store_int(reinterpret_cast<int32_t*>(to), acc[p][r][v]);
        else
            store(to, scaled(acc[p][r][v], x.weight_scales + p * kPanel + lane, x.scales[r]));
    });
}

// sums += the products of some inputs; w is at the first one's weights, and then behind the last
// one's.
template <int M, int V, int P>
inline void add_inputs(Integers (&sums)[P][M][V], const int8_t* run, int64_t count,
                       const uint8_t*& w, int vector, Apart apart) {
    for (int64_t i = 0; i < count; i += kFour, w += kLine) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const Bytes both = load_bytes(w + p * apart.weights);
            fetch_weights<M>(w + p * apart.weights + kPrefetch, apart.is_read_once);
            Bytes lanes[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                lanes[v] = vector + v == 0 ? low_nibbles(both) : high_nibbles(both);
#pragma GCC unroll 16
            for (int r = 0; r < M; ++r) {
                const Four four = splat_four(run + i + r * kRun);
                for (int v = 0; v < V; ++v)
                    sums[p][r][v] = add_nibbles(sums[p][r][v], lanes[v], four);
            }
        }
    }
}

// total += a group's sum times its scales; w is at the group, run at its inputs.
template <int M, int V, int P>
inline void add_group(F32 (&total)[P][M][V], int64_t group, const int32_t* starts,
                      const int8_t* run, const uint8_t* w, int vector, Apart apart) {
    Integers acc[P][M][V];
    each_sum<P, M, V>([&](int p, int r, int v) { acc[p][r][v] = splat_int(starts[r]); });
    if constexpr (kNarrow == 0) {
        add_inputs(acc, run, group, w, vector, apart);
    } else {
        for (int64_t k = 0; k < group; k += kNarrow) {
            Integers narrow[P][M][V];
            each_sum<P, M, V>([&](int p, int r, int v) { narrow[p][r][v] = splat_int(0); });
            add_inputs(narrow, run + k, kNarrow, w, vector, apart);
            each_sum<P, M, V>([&](int p, int r, int v) {
                acc[p][r][v] = widened(acc[p][r][v], narrow[p][r][v]);
            });
        }
    }
    each_sum<P, M, V>([&](int p, int r, int v) {
        const auto* scales = reinterpret_cast<const BF16*>(w + p * apart.weights);
        const F32 scale = load(scales + (vector + v) * kLanes);
        total[p][r][v] = fma(to_float(acc[p][r][v]), scale, total[p][r][v]);
    });
}

// The same for int4, in fp32.
template <int M, int V, int P>
inline void multiply_nibbles(const Segment& x, int vector, float* sums, int64_t stride,
                             Apart apart) {
    F32 total[P][M][V];
    each_sum<P, M, V>([&](int p, int r, int v) { total[p][r][v] = splat(0); });
    const int64_t inputs = round_up(x.in, x.group);
    const int8_t* run = x.bytes;
    const int32_t* starts = x.starts;
    const uint8_t* w = x.weights;
    for (int64_t k = 0; k < inputs; k += kRun, run += x.rows * kRun) {
        const int64_t count = inputs - k < kRun ? inputs - k : kRun;
        for (int64_t i = 0; i < count; i += x.group, starts += x.rows) {
            add_group(total, x.group, starts, run + i, w, vector, apart);
            w += group_bytes(x.group);
        }
    }
    each_sum<P, M, V>([&](int p, int r, int v) {
        const F32 scale = splat(x.scales == nullptr ? 1 : x.scales[r]);
        store(sums + p * kPanel + r * stride + (vector + v) * kLanes, mul(total[p][r][v], scale));
    });
}

template <bool kIsInt4>
class QuantizedProduct {
   public:
    static size_t num_bytes(const LinearArgs& a, int64_t rows) {
        return Prepared::num_bytes(Cut(a), rows);
    }

    static constexpr int kMostPanels = kIsInt4 ? kNibblePanels : 4;

    QuantizedProduct(const LinearArgs& a, int64_t rows, void* memory)
        : a_(a),
          weight_(a.weight),
          panel_bytes_(panel_bytes(a.weight)),
          cut_(a),
          x_(cut_, rows, memory),
          is_whole_(cut_.segments == 1 && a.finish.kind != FinishKind::partial) {}

    int64_t segments() const { return cut_.segments; }

    void prepare(int64_t row, int64_t token) const {
        with_type(weight_.type, [&](auto type) {
            const auto* x = row_of<decltype(type)>(a_.x, token, 0);
            const Range range =
                a_.peaks == nullptr ? range_of(x, weight_.in) : range_up_to(a_.peaks[token]);
            round_row(row, x, byte_steps(range));
        });
        const int32_t excess = kIsInt4 ? 8 : kByteOffset;
        int32_t* starts = x_.starts + row;
        for (int64_t s = 0; s < cut_.segments; ++s)
            for (int64_t g = 0; g < cut_.groups; ++g, starts += x_.rows)
                *starts = -excess * sum_of(x_.segment(cut_, s) + row * kRun, g * cut_.group);
    }

    template <int P>
    void multiply(int64_t panel, int64_t segment, float* sums, int64_t stride) const {
        constexpr int kHeight = P > 1 ? kFewRows : kIsInt4 ? kNibbleRows : kByteRows;
        const int64_t blocks = (x_.rows + kHeight - 1) / kHeight;
        const Segment all = of(panel, segment);
        for (int64_t block = 0, row = 0; block < blocks; ++block) {
            const int64_t next = (block + 1) * x_.rows / blocks;
            multiply_rows<kHeight, P>(next - row, all.from_row(row), sums + row * stride, stride);
            row = next;
        }
    }

    // Of int4: sums of int8 come from one segment.
    F32 concluded(int64_t row, F32 sum) const { return mul(sum, splat(x_.scales[row])); }

   private:
    // x becomes a row's bytes and their scale.
    template <class E>
    void round_row(int64_t row, const E* x, Steps steps) const {
        x_.scales[row] = steps.scale;
        for (int64_t s = 0; s < cut_.segments; ++s, x += cut_.in) {
            int8_t* run = x_.segment(cut_, s) + row * kRun;
            int64_t left = cut_.padded();  // of the inputs that products read
            for (int64_t k = 0; k < cut_.in; k += kRun, left -= kRun, run += x_.rows * kRun) {
                const int64_t count = cut_.in - k < kRun ? cut_.in - k : kRun;
                quantize(x + k, count, steps.inverse, -127, 127, run);
                for (int64_t i = round_up(count, kLanes); i < left && i < kRun; ++i) run[i] = 0;
            }
        }
    }

    // Of the bytes of a group that begins at `first`, in a row whose first run is given.
    int32_t sum_of(const int8_t* runs, int64_t first) const {
        int32_t sum = 0;
        const int64_t stop = first + cut_.group;
        for (int64_t k = first; k < stop; k += kRun) {
            const int8_t* run = runs + k / kRun * kRun * x_.rows + k % kRun;
            const int64_t count = stop - k < kRun ? stop - k : kRun;
            for (int64_t i = 0; i < count; ++i) sum += run[i];
        }
        return sum;
    }

    Segment of(int64_t panel, int64_t segment) const {
        const int64_t before = segment * cut_.groups;
        const int64_t size = kIsInt4 ? group_bytes(cut_.group) : cut_.group * kPanel;
        return {x_.segment(cut_, segment),
                x_.starts + before * x_.rows,
                is_whole_ ? x_.scales : nullptr,
                x_.rows,
                cut_.in,
                cut_.group,
                static_cast<const uint8_t*>(weight_.panels) + panel * panel_bytes_ + before * size,
                weight_.scales + panel * kPanel};
    }

    template <int M, int P>
    void multiply_rows(int64_t height, const Segment& x, float* sums, int64_t stride) const {
        if (height != M) {
            if constexpr (M > 1) multiply_rows<M - 1, P>(height, x, sums, stride);
            return;
        }
        constexpr int V = is_wide(M, P) ? kPanel / kLanes : kByteVectors;
        const Apart apart{panel_bytes_, weight_.is_streamed && x_.rows == 1};
        for (int v = 0; v < kPanel / kLanes; v += V) {
            if constexpr (kIsInt4)
                multiply_nibbles<M, V, P>(x, v, sums, stride, apart);
            else
                multiply_bytes<M, V, P>(x, v, sums, stride, apart);
        }
    }

    const LinearArgs& a_;
    const PackedWeight& weight_;
    const int64_t panel_bytes_;
    const Cut cut_;
    const Prepared x_;
    const bool is_whole_;
};

Status linear(const LinearArgs& a, int64_t tokens, Pool& pool) {
    return is_int4(a.weight) ? multiply<QuantizedProduct<true>>(a, tokens, pool)
                             : multiply<QuantizedProduct<false>>(a, tokens, pool);
}

Status grouped(const GroupedArgs& a, int64_t, Pool& pool) {
    return is_int4(a.product.weight) ? multiply_groups<QuantizedProduct<true>>(a, pool)
                                     : multiply_groups<QuantizedProduct<false>>(a, pool);
}

// The step of an output's weights, of the peak that is given or of their own.
template <class E>
inline Steps steps_of(const PackQuantizedArgs& a, const E* row, int64_t at) {
    return byte_steps(a.peaks == nullptr ? peak_of(row, a.weight.in) : range_up_to(a.peaks[at]));
}

// Weights of a panel in int8: the lanes of some outputs. A row is read for its peak, and once more,
// from the cache, a tile of 16 words after another. It is looked at for NaN where the peak that was
// searched for is not finite, which makes its scale NaN.
template <class E>
inline void pack_bytes(const PackQuantizedArgs& a, const PanelOutputs& outputs, Lanes lanes,
                       int64_t panel) {
    constexpr int64_t of_tile = kTile * kFour;
    const PackedWeight& w = a.weight;
    const int64_t padded = round_up(w.in, kFour), first = outputs.first - a.outputs.first;
    const uint32_t flip = 0x80808080;  // q + 128
    uint8_t* const to = a.panels + panel * panel_bytes(w);
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += kTile) {
        const int64_t count = lanes.end - lane < kTile ? lanes.end - lane : kTile;
        Steps steps[kTile];
        for (int64_t i = 0; i < count; ++i) {
            steps[i] = steps_of(a, row_of<E>(a.source, first + lane + i, 0), first + lane + i);
            a.scales[panel * kPanel + lane + i] = steps[i].scale;
            const bool is_finite = steps[i].scale == steps[i].scale;
            if (a.peaks == nullptr && !is_finite) note_nan<E>(a, outputs, {lane + i, lane + i + 1});
        }
        alignas(64) int8_t tile[kTile * of_tile];
        for (int64_t k = 0; k < padded; k += of_tile) {
            const int64_t left = w.in - k, inputs = left < of_tile ? left : of_tile;
            if (inputs < of_tile) __builtin_memset(tile, 0, sizeof tile);
            for (int64_t i = 0; i < count; ++i)
                quantize_within(row_of<E>(a.source, first + lane + i, 0) + k, inputs,
                                steps[i].inverse, tile + i * of_tile);
            uint8_t* place = to + k / kFour * kByteLine + lane * kFour;
            if (count == kTile && inputs == of_tile) {
                transpose_tile(reinterpret_cast<uint8_t*>(tile), of_tile, place, kByteLine,
                               Flip{flip});
                continue;
            }
            const int64_t words = (padded - k < of_tile ? padded - k : of_tile) / kFour;
            for (int64_t word = 0; word < words; ++word)
                for (int64_t i = 0; i < count; ++i) {
                    uint32_t bits;
                    __builtin_memcpy(&bits, tile + i * of_tile + word * kFour, kFour);
                    bits ^= flip;
                    __builtin_memcpy(place + word * kByteLine + i * kFour, &bits, kFour);
                }
        }
    }
    finish_lines();
}

// The same for int4, of one output. Its nibbles of the panel are replaced, and the others kept.
template <class E>
inline void pack_nibbles(const PackQuantizedArgs& a, const E* row, int64_t panel, int64_t lane,
                         int8_t* bytes) {
    const PackedWeight& w = a.weight;
    uint8_t* to = a.panels + panel * panel_bytes(w);
    for (int64_t g = 0; g < groups_of(w); ++g) {
        const int64_t left = w.in - g * w.group, count = left < w.group ? left : w.group;
        const Steps steps = nibble_steps(range_of(row + g * w.group, count));
        quantize(row + g * w.group, count, steps.inverse, -8, 7, bytes);
        for (int64_t i = count; i < w.group; ++i) bytes[i] = 0;
        for (int64_t i = 0; i < w.group; ++i) {
            const auto q = static_cast<uint8_t>(bytes[i] + 8);
            uint8_t& both = to[i / kFour * kLine + lane % kLanes * kFour + i % kFour];
            both = lane < kLanes ? (both & 0xf0) | q : (both & 0x0f) | q << 4;
        }
        to += w.group * kPanel / 2;
        store_part(reinterpret_cast<BF16*>(to) + lane, 1, splat(steps.scale));
        to += kPanel * sizeof(BF16);
    }
}

Status pack(const PackQuantizedArgs& a, int64_t, Pool& pool) {
    with_type(a.weight.type, [&](auto type) {
        using E = decltype(type);
        const Panels panels(a.weight, a.outputs);
        parallel(pool, panels.count, [&](int64_t i, int worker) {
            const int64_t panel = panels.first + i;
            const PanelOutputs outputs(a.weight, panel);
            const Lanes lanes = outputs.lanes_of(a.outputs);
            if (is_int4(a.weight) || a.peaks != nullptr) note_nan<E>(a, outputs, lanes);
            if (!is_int4(a.weight)) return pack_bytes<E>(a, outputs, lanes, panel);
            const size_t room = round_up(a.weight.in + a.weight.group, kLine);
            auto* bytes = static_cast<int8_t*>(scratch(pool, worker, room));
            for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
                const int64_t at = outputs.first + lane - a.outputs.first;
                pack_nibbles(a, row_of<E>(a.source, at, 0), panel, lane, bytes);
            }
        });
    });
    return Status::ok;
}

}  // namespace

void fill_quantized(Kernels& table) {
    table.linear_quantized = {linear, grouped};
    table.pack_quantized = pack;
}

}  // namespace quire::QUIRE_LEVEL
