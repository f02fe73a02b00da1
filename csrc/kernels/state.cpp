// Layers with a recurrent state: short convolution, the scans of Mamba, the gated delta rule, and
// the norm with a gate that follows them. See ops/mixers/state.py.
//
// A tile is one row of the step and one head, or some channels: it goes through the row's tokens in
// order. A state flows from where it is read to where it is kept: from the block that the row
// begins with, through memory of the tile, into the blocks that are written. Nothing of a lane
// depends on other lanes, so that a row's bits are those of its tokens alone.

#include <type_traits>

#include "kernels/activation.hpp"
#include "kernels/kernels.hpp"
#include "kernels/tiles.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// The most vectors that are computed together: their sums stay in registers.
#if defined(__AVX512F__)
constexpr int kTogether = 8;
#elif defined(__AVX2__)
constexpr int kTogether = 4;
#else
constexpr int kTogether = 1;
#endif

// Tokens from the one that is computed to the one whose rows are fetched: rows of a projection are
// kilobytes apart, in pages of their own, where processors do not fetch ahead by themselves.
constexpr int64_t kAhead = 4;

// Channels of a tile where there are no heads.
constexpr int64_t kChannels = 256;

template <int N>
using Count = std::integral_constant<int, N>;

// body(lanes, offset, vectors) for all of `width` lanes: as many vectors at a time as are left, by
// powers of two.
template <int N = kTogether, class Body>
inline void in_groups(int64_t width, const Body& body, int64_t i = 0) {
    for (; i + N * kLanes <= width; i += N * kLanes) body(Whole{}, i, Count<N>{});
    if constexpr (N > 1)
        in_groups<N / 2>(width, body, i);
    else if (i < width)
        body(Part{width - i}, i, Count<1>{});
}

// log(1 + e^v). 2 atanh(u / (2 + u)) is log(1 + u), here of u <= 1.
inline F32 softplus(F32 v) {
    const F32 u = exp(negative(max(v, negative(v))));
    const F32 z = div(u, add(u, splat(2)));
    const F32 w = mul(z, z);
    F32 p = splat(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) p = fma(p, w, splat(1.0f / static_cast<float>(odd)));
    return add(max(splat(0), v), mul(add(z, z), p));
}

inline float of_one(F32 (*function)(F32), float v) { return first(function(splat(v))); }

// `count` elements of a token's row, from `begin` on, in fp32.
inline void widen(Type type, const Rows& rows, int64_t token, int64_t begin, int64_t count,
                  float* out) {
    with_type(type, [&](auto element) {
        using E = decltype(element);
        const E* x = row_of<E>(rows, token, 0) + begin;
        each(count, [&](auto lanes, int64_t i) { put(lanes, out + i, get(lanes, x + i)); });
    });
}

// Have those elements fetched.
inline void fetch(Type type, const Rows& rows, int64_t token, int64_t begin, int64_t count) {
    with_type(type, [&](auto element) {
        const auto* x = row_of<decltype(element)>(rows, token, 0) + begin;
        constexpr int64_t kLine = 64 / sizeof(*x);
        for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(x + i);
    });
}

inline float widen_one(Type type, const Rows& rows, int64_t token, int64_t index) {
    return with_type(type, [&](auto element) {
        return first(load_part(row_of<decltype(element)>(rows, token, 0) + index, 1));
    });
}

inline void narrow(Type type, const Rows& rows, int64_t token, int64_t begin, int64_t count,
                   const float* x) {
    with_type(type, [&](auto element) {
        using E = decltype(element);
        E* out = row_of<E>(rows, token, 0) + begin;
        each(count, [&](auto lanes, int64_t i) { put(lanes, out + i, get(lanes, x + i)); });
    });
}

template <class T>
inline T* block_of(const States& s, int64_t block) {
    return reinterpret_cast<T*>(s.data + block * s.block_bytes);
}

// The first tokens of the step's rows, and T.
struct Starts {
    int64_t* tokens;
    int64_t count;
};

inline Status find_rows(const States& s, int64_t tokens, Pool& pool, Starts& found) {
    found = {static_cast<int64_t*>(shared_scratch(pool, (tokens + 1) * sizeof(int64_t))), 0};
    if (tokens > 0 && s.reads[0] < 0) return Status::bad_index;
    for (int64_t t = 0; t < tokens; ++t) {
        if (s.reads[t] >= s.num_blocks || s.writes[t] >= s.num_blocks) return Status::bad_index;
        if (s.reads[t] >= 0) found.tokens[found.count++] = t;
    }
    found.tokens[found.count] = tokens;
    return Status::ok;
}

// body(first token, last + 1, part, worker) for every row and each of `parts` parts of its state.
template <class Body>
inline Status for_rows(const States& s, int64_t tokens, int64_t parts, Pool& pool,
                       const Body& body) {
    Starts rows;
    const Status status = find_rows(s, tokens, pool, rows);
    if (status != Status::ok) return status;
    parallel(pool, rows.count * parts, [&](int64_t tile, int worker) {
        const int64_t row = tile / parts;
        body(rows.tokens[row], rows.tokens[row + 1], tile % parts, worker);
    });
    return Status::ok;
}

// A state of fp32 in rows of lanes, or a part of one.
struct Numbers {
    float* data;
    int64_t stride;
};

// advance(token, before, after) along a row, for the part of the state at `begin` of a block whose
// rows are `stride` apart, and coming(token) for tokens ahead. `own` keeps the state between tokens
// after which it is not written.
template <class Coming, class Advance>
inline void walk(const States& s, int64_t first, int64_t stop, int64_t begin, int64_t stride,
                 Numbers own, const Coming& coming, const Advance& advance) {
    Numbers before{block_of<float>(s, s.reads[first]) + begin, stride};
    for (int64_t t = first; t < stop; ++t) {
        if (t + kAhead < stop) coming(t + kAhead);
        const bool is_kept = s.writes[t] >= 0;
        const Numbers after =
            is_kept ? Numbers{block_of<float>(s, s.writes[t]) + begin, stride} : own;
        advance(t, before, after);
        before = after;
    }
}

// Columns of a head's state that a tile computes, a divisor of `dim`: a wider state than that would
// not stay in the first-level cache from one token to the next.
inline int64_t columns_of(int64_t size, int64_t dim) {
    constexpr int64_t kBytes = 32768;
    int64_t columns = dim;
    while (columns % 2 == 0 && columns > 4 * kLanes &&
           size * columns * static_cast<int64_t>(sizeof(float)) > kBytes)
        columns /= 2;
    return columns;
}

// What a tile computes of a head: some columns of its state, and so some lanes of its values.
struct Columns {
    int64_t head;
    int64_t values;  // where these lanes begin in a token's values, of all heads
    int64_t keys;    // the same for the head's keys, which `heads / groups` heads share
    int64_t count;
    float* numbers;  // room for a token's: `count` values and twice `size`
};

// A recurrence over heads, each with a state [size, dim]: coming(columns, token) for tokens ahead,
// advance(columns, token, before, after).
template <class Args, class Coming, class Advance>
inline Status scan_heads(const Args& a, int64_t groups, int64_t tokens, Pool& pool,
                         const Coming& coming, const Advance& advance) {
    const int64_t columns = columns_of(a.size, a.dim), parts_of_head = a.dim / columns;
    const size_t bytes = (columns + 2 * a.size + a.size * columns) * sizeof(float);
    return for_rows(
        a.states, tokens, a.heads * parts_of_head, pool,
        [&](int64_t first, int64_t stop, int64_t part, int worker) {
            auto* own = static_cast<float*>(scratch(pool, worker, bytes));
            const int64_t head = part / parts_of_head, begin = part % parts_of_head * columns;
            const Columns at{head, head * a.dim + begin, head / (a.heads / groups) * a.size,
                             columns, own + a.size * columns};
            walk(
                a.states, first, stop, head * a.size * a.dim + begin, a.dim, {own, columns},
                [&](int64_t token) { coming(at, token); },
                [&](int64_t token, Numbers before, Numbers after) {
                    advance(at, token, before, after);
                });
        });
}

// ---- short convolution

template <class E>
inline F32 conv_input(const ShortConvArgs& a, int64_t token, int64_t i, auto lanes) {
    const F32 x = get(lanes, row_of<E>(a.x, token, 0) + i);
    if (a.before.data == nullptr) return x;
    return rounded(E{}, mul(get(lanes, row_of<E>(a.before, token, 0) + i), x));
}

template <class E, class Lanes>
inline F32 conv_output(const ShortConvArgs& a, int64_t token, int64_t i, Lanes lanes, F32 sum) {
    if (a.bias != nullptr) sum = add(sum, get(lanes, static_cast<const E*>(a.bias) + i));
    if (a.act == Act::silu) sum = Silu::of(sum);
    if (a.after.data == nullptr) return sum;
    return mul(get(lanes, row_of<E>(a.after, token, 0) + i), rounded(E{}, sum));
}

// The tokens of a row, for one vector of channels; `window` holds the last K - 1 inputs.
template <class E, class Lanes>
inline void conv_lanes(const ShortConvArgs& a, int64_t first, int64_t stop, int64_t i, Lanes lanes,
                       F32* window) {
    const int64_t past = a.kernel - 1;
    const E* weight = static_cast<const E*>(a.weight) + i;
    const E* begin = block_of<E>(a.states, a.states.reads[first]) + i;
    for (int64_t k = 0; k < past; ++k) window[k] = get(lanes, begin + k * a.width);
    for (int64_t t = first; t < stop; ++t) {
        if (t + kAhead < stop) __builtin_prefetch(row_of<E>(a.x, t + kAhead, 0) + i);
        const F32 newest = conv_input<E>(a, t, i, lanes);
        F32 sum = splat(0);
        for (int64_t k = 0; k < past; ++k)
            sum = fma(window[k], get(lanes, weight + k * a.width), sum);
        sum = fma(newest, get(lanes, weight + past * a.width), sum);
        put(lanes, row_of<E>(a.out, t, 0) + i, conv_output<E>(a, t, i, lanes, sum));
        for (int64_t k = 1; k < past; ++k) window[k - 1] = window[k];
        window[past - 1] = newest;
        if (a.states.writes[t] < 0) continue;
        E* kept = block_of<E>(a.states, a.states.writes[t]) + i;
        for (int64_t k = 0; k < past; ++k) put(lanes, kept + k * a.width, window[k]);
    }
}

Status short_conv(const ShortConvArgs& a, int64_t tokens, Pool& pool) {
    const int64_t parts = (a.width + kChannels - 1) / kChannels;
    const size_t bytes = a.kernel * sizeof(F32);
    return for_rows(
        a.states, tokens, parts, pool, [&](int64_t first, int64_t stop, int64_t part, int worker) {
            auto* window = static_cast<F32*>(scratch(pool, worker, bytes));
            const int64_t begin = part * kChannels, left = a.width - begin;
            with_type(a.type, [&](auto type) {
                each(left < kChannels ? left : kChannels, [&](auto lanes, int64_t i) {
                    conv_lanes<decltype(type)>(a, first, stop, begin + i, lanes, window);
                });
            });
        });
}

// ---- Mamba

// A token's numbers for some channels, in fp32.
struct Channels {
    float* x;     // becomes y
    float* step;  // after softplus
    float* b;
    float* c;
};

template <int N, class Lanes>
inline void mamba_lanes(const MambaScanArgs& a, const Channels& now, int64_t begin, int64_t i,
                        Lanes lanes, Numbers before, Numbers after) {
    F32 step[N], entering[N], y[N];
    for (int v = 0; v < N; ++v) {
        step[v] = get(lanes, now.step + i + v * kLanes);
        entering[v] = mul(step[v], get(lanes, now.x + i + v * kLanes));
        y[v] = splat(0);
    }
    for (int64_t n = 0; n < a.size; ++n) {
        const F32 b = splat(now.b[n]), c = splat(now.c[n]);
        const float* decay = a.decay + n * a.width + begin + i;
        for (int v = 0; v < N; ++v) {
            const F32 kept = exp(mul(step[v], get(lanes, decay + v * kLanes)));
            const F32 old = get(lanes, before.data + n * before.stride + i + v * kLanes);
            const F32 state = fma(entering[v], b, mul(kept, old));
            put(lanes, after.data + n * after.stride + i + v * kLanes, state);
            y[v] = fma(state, c, y[v]);
        }
    }
    for (int v = 0; v < N; ++v) {
        const int64_t at = i + v * kLanes;
        const F32 skipped = mul(get(lanes, a.skip + begin + at), get(lanes, now.x + at));
        put(lanes, now.x + at, add(y[v], skipped));
    }
}

inline void mamba_token(const MambaScanArgs& a, const Channels& now, int64_t token, int64_t begin,
                        int64_t count, Numbers before, Numbers after) {
    widen(a.type, a.x, token, begin, count, now.x);
    widen(a.type, a.dt, token, begin, count, now.step);
    widen(a.type, a.b, token, 0, a.size, now.b);
    widen(a.type, a.c, token, 0, a.size, now.c);
    each(count, [&](auto lanes, int64_t i) {
        put(lanes, now.step + i, softplus(get(lanes, now.step + i)));
    });
    in_groups(count, [&](auto lanes, int64_t i, auto vectors) {
        mamba_lanes<vectors.value>(a, now, begin, i, lanes, before, after);
    });
    if (a.gate.data != nullptr) {
        widen(a.type, a.gate, token, begin, count, now.step);
        each(count, [&](auto lanes, int64_t i) {
            const F32 gate = Silu::of(get(lanes, now.step + i));
            put(lanes, now.x + i, mul(get(lanes, now.x + i), gate));
        });
    }
    narrow(a.type, a.out, token, begin, count, now.x);
}

Status mamba_scan(const MambaScanArgs& a, int64_t tokens, Pool& pool) {
    const int64_t parts = (a.width + kChannels - 1) / kChannels;
    const size_t bytes = (2 * kChannels + 2 * a.size + a.size * kChannels) * sizeof(float);
    return for_rows(a.states, tokens, parts, pool,
                    [&](int64_t first, int64_t stop, int64_t part, int worker) {
                        auto* memory = static_cast<float*>(scratch(pool, worker, bytes));
                        const int64_t begin = part * kChannels, left = a.width - begin;
                        const int64_t count = left < kChannels ? left : kChannels;
                        float* own = memory + 2 * kChannels;
                        const Channels now{memory, memory + kChannels, own + a.size * kChannels,
                                           own + a.size * (kChannels + 1)};
                        const auto coming = [&](int64_t token) {
                            fetch(a.type, a.x, token, begin, count);
                            fetch(a.type, a.dt, token, begin, count);
                            if (a.gate.data != nullptr) fetch(a.type, a.gate, token, begin, count);
                            fetch(a.type, a.b, token, 0, a.size);
                            fetch(a.type, a.c, token, 0, a.size);
                        };
                        walk(a.states, first, stop, begin, a.width, {own, kChannels}, coming,
                             [&](int64_t token, Numbers before, Numbers after) {
                                 mamba_token(a, now, token, begin, count, before, after);
                             });
                    });
}

// ---- Mamba-2

template <int N, class Lanes>
inline void mamba2_lanes(int64_t size, F32 kept, F32 step, float skip, const Channels& now,
                         int64_t i, Lanes lanes, Numbers before, Numbers after) {
    F32 x[N], entering[N], y[N];
    for (int v = 0; v < N; ++v) {
        x[v] = get(lanes, now.x + i + v * kLanes);
        entering[v] = mul(step, x[v]);
        y[v] = splat(0);
    }
    for (int64_t n = 0; n < size; ++n) {
        const F32 b = splat(now.b[n]), c = splat(now.c[n]);
        for (int v = 0; v < N; ++v) {
            const F32 old = get(lanes, before.data + n * before.stride + i + v * kLanes);
            const F32 state = fma(entering[v], b, mul(kept, old));
            put(lanes, after.data + n * after.stride + i + v * kLanes, state);
            y[v] = fma(state, c, y[v]);
        }
    }
    for (int v = 0; v < N; ++v)
        put(lanes, now.x + i + v * kLanes, add(y[v], mul(splat(skip), x[v])));
}

inline float mamba2_step(const Mamba2ScanArgs& a, int64_t token, int64_t head) {
    const float raw = widen_one(a.type, a.dt, token, head) + a.dt_bias[head];
    const F32 step = min(splat(a.largest_step), max(splat(a.least_step), softplus(splat(raw))));
    return first(step);
}

inline void mamba2_token(const Mamba2ScanArgs& a, const Columns& at, int64_t token, Numbers before,
                         Numbers after) {
    float* x = at.numbers;
    const Channels now{x, nullptr, x + at.count, x + at.count + a.size};
    widen(a.type, a.x, token, at.values, at.count, now.x);
    widen(a.type, a.b, token, at.keys, a.size, now.b);
    widen(a.type, a.c, token, at.keys, a.size, now.c);
    const F32 step = splat(mamba2_step(a, token, at.head));
    const F32 kept = exp(mul(step, splat(a.decay[at.head])));
    const float skip = a.skip[at.head];
    in_groups(at.count, [&](auto lanes, int64_t i, auto vectors) {
        mamba2_lanes<vectors.value>(a.size, kept, step, skip, now, i, lanes, before, after);
    });
    narrow(a.type, a.out, token, at.values, at.count, now.x);
}

Status mamba2_scan(const Mamba2ScanArgs& a, int64_t tokens, Pool& pool) {
    return scan_heads(
        a, a.groups, tokens, pool,
        [&](const Columns& at, int64_t token) {
            fetch(a.type, a.x, token, at.values, at.count);
            fetch(a.type, a.dt, token, at.head, 1);
            fetch(a.type, a.b, token, at.keys, a.size);
            fetch(a.type, a.c, token, at.keys, a.size);
        },
        [&](const Columns& at, int64_t token, Numbers before, Numbers after) {
            mamba2_token(a, at, token, before, after);
        });
}

// ---- the gated delta rule

// A token's numbers for one head, in fp32.
struct Head {
    float* q;
    float* k;
    float* v;  // becomes y
};

// x / |x|, times `scale`.
inline void normalise(float* x, int64_t size, float eps, float scale) {
    const float squares = total(size, [&](auto lanes, int64_t i) {
        const F32 v = get(lanes, x + i);
        return mul(v, v);
    });
    const F32 inverse = splat(1.0f / __builtin_sqrtf(squares + eps)), factor = splat(scale);
    each(size, [&](auto lanes, int64_t i) {
        put(lanes, x + i, mul(mul(get(lanes, x + i), inverse), factor));
    });
}

template <int N, class Lanes>
inline void delta_lanes(int64_t size, F32 kept, F32 beta, const Head& now, int64_t i, Lanes lanes,
                        Numbers before, Numbers after) {
    F32 delta[N], y[N];
    for (int v = 0; v < N; ++v) delta[v] = y[v] = splat(0);
    for (int64_t n = 0; n < size; ++n) {
        const F32 key = splat(now.k[n]);
        for (int v = 0; v < N; ++v) {
            const F32 old = get(lanes, before.data + n * before.stride + i + v * kLanes);
            delta[v] = fma(mul(kept, old), key, delta[v]);
        }
    }
    for (int v = 0; v < N; ++v)
        delta[v] = mul(sub(get(lanes, now.v + i + v * kLanes), delta[v]), beta);
    for (int64_t n = 0; n < size; ++n) {
        const F32 key = splat(now.k[n]), query = splat(now.q[n]);
        for (int v = 0; v < N; ++v) {
            const F32 old = get(lanes, before.data + n * before.stride + i + v * kLanes);
            const F32 state = fma(key, delta[v], mul(kept, old));
            put(lanes, after.data + n * after.stride + i + v * kLanes, state);
            y[v] = fma(state, query, y[v]);
        }
    }
    for (int v = 0; v < N; ++v) put(lanes, now.v + i + v * kLanes, y[v]);
}

inline void delta_token(const GatedDeltaArgs& a, const Columns& at, int64_t token, Numbers before,
                        Numbers after) {
    float* v = at.numbers;
    const Head now{v + at.count, v + at.count + a.size, v};
    widen(a.type, a.q, token, at.keys, a.size, now.q);
    widen(a.type, a.k, token, at.keys, a.size, now.k);
    widen(a.type, a.v, token, at.values, at.count, now.v);
    normalise(now.q, a.size, a.eps, 1.0f / __builtin_sqrtf(static_cast<float>(a.size)));
    normalise(now.k, a.size, a.eps, 1.0f);
    const float entering = widen_one(a.type, a.a, token, at.head) + a.dt_bias[at.head];
    const F32 kept = exp(splat(of_one(softplus, entering) * a.decay[at.head]));
    const F32 beta = sigmoid(splat(widen_one(a.type, a.b, token, at.head)));
    in_groups(at.count, [&](auto lanes, int64_t i, auto vectors) {
        delta_lanes<vectors.value>(a.size, kept, beta, now, i, lanes, before, after);
    });
    narrow(a.type, a.out, token, at.values, at.count, now.v);
}

Status gated_delta(const GatedDeltaArgs& a, int64_t tokens, Pool& pool) {
    return scan_heads(
        a, a.key_heads, tokens, pool,
        [&](const Columns& at, int64_t token) {
            fetch(a.type, a.q, token, at.keys, a.size);
            fetch(a.type, a.k, token, at.keys, a.size);
            fetch(a.type, a.v, token, at.values, at.count);
            fetch(a.type, a.a, token, at.head, 1);
            fetch(a.type, a.b, token, at.head, 1);
        },
        [&](const Columns& at, int64_t token, Numbers before, Numbers after) {
            delta_token(a, at, token, before, after);
        });
}

// ---- the norm with a gate

// One group: the product or y, over its root mean square, times the weight.
template <class E>
inline void gated_group(const GatedNormArgs& a, int64_t token, int64_t begin) {
    const E* y = row_of<E>(a.y, token, 0) + begin;
    const E* gate = row_of<E>(a.gate, token, 0) + begin;
    E* out = row_of<E>(a.out, token, 0) + begin;
    const auto entering = [&](auto lanes, int64_t i) {
        const F32 v = get(lanes, y + i);
        return a.gate_first ? mul(v, Silu::of(get(lanes, gate + i))) : v;
    };
    if (a.weight == nullptr) {
        each(a.group, [&](auto lanes, int64_t i) { put(lanes, out + i, entering(lanes, i)); });
        return;
    }
    const E* weight = static_cast<const E*>(a.weight) + (a.is_weight_shared ? 0 : begin);
    const float squares = total(a.group, [&](auto lanes, int64_t i) {
        const F32 v = entering(lanes, i);
        return mul(v, v);
    });
    const float mean = squares / static_cast<float>(a.group);
    const F32 inverse = splat(1.0f / __builtin_sqrtf(mean + a.eps));
    each(a.group, [&](auto lanes, int64_t i) {
        const F32 normed = rounded(E{}, mul(entering(lanes, i), inverse));
        F32 v = mul(normed, get(lanes, weight + i));
        if (!a.gate_first) v = mul(rounded(E{}, v), Silu::of(get(lanes, gate + i)));
        put(lanes, out + i, v);
    });
}

Status gated_norm(const GatedNormArgs& a, int64_t tokens, Pool& pool) {
    const int64_t groups = a.width / a.group;
    with_type(a.type, [&](auto type) {
        parallel_rows(pool, tokens * groups, a.group, [&](int64_t first, int64_t stop) {
            for (int64_t i = first; i < stop; ++i)
                gated_group<decltype(type)>(a, i / groups, i % groups * a.group);
        });
    });
    return Status::ok;
}

}  // namespace

void fill_state(Kernels& table) {
    table.short_conv = short_conv;
    table.mamba_scan = mamba_scan;
    table.mamba2_scan = mamba2_scan;
    table.gated_delta = gated_delta;
    table.gated_norm = gated_norm;
}

}  // namespace quire::QUIRE_LEVEL
