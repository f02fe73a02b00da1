// From fp32 to small integers: rows of activations, and weights.
//
// ops/quantized.py is the definition; the numbers are the same, bit for bit.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kLine = 64;
inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

struct Range {
    float low, high;
    float nothing;  // 0; NaN if there is a NaN or an infinity
};

template <class E>
inline Range range_of(const E* x, int64_t count) {
    F32 low = splat(0), high = low, nothing = low;
    each(count, [&](auto lanes, int64_t i) {
        const F32 v = get(lanes, x + i);
        low = min(low, v);
        high = max(high, v);
        nothing = fma(v, splat(0), nothing);
    });
    float lows[kLanes], highs[kLanes];
    store(lows, low);
    store(highs, high);
    for (int64_t i = 1; i < kLanes; ++i) {
        if (lows[i] < lows[0]) lows[0] = lows[i];
        if (highs[i] > highs[0]) highs[0] = highs[i];
    }
    return {lows[0], highs[0], reduce(nothing)};
}

// Of values of which only the largest magnitude is known: NaN if one of them is not finite.
inline Range range_up_to(float peak) { return {-peak, peak, peak * 0}; }

// The range of values as far as their largest magnitude says it.
template <class E>
inline Range peak_of(const E* x, int64_t count) {
    return range_of(x, count);
}
// The magnitudes of numbers are in the order of their bits, and without a sign those are compared
// 32 at a time; what is not finite is above all others.
inline Range peak_of(const BF16* x, int64_t count) {
    constexpr int kSide = 64;
    uint16_t most[kSide] = {};
    int64_t i = 0;
    for (; i + kSide <= count; i += kSide)
        for (int j = 0; j < kSide; ++j) {
            const uint16_t bits = x[i + j].bits & 0x7fff;
            most[j] = bits > most[j] ? bits : most[j];
        }
    uint16_t largest = 0;
    for (; i < count; ++i)
        largest = (x[i].bits & 0x7fff) > largest ? x[i].bits & 0x7fff : largest;
    for (int j = 0; j < kSide; ++j) largest = most[j] > largest ? most[j] : largest;
    if (largest >= 0x7f80) return range_of(x, count);
    const uint32_t wide = static_cast<uint32_t>(largest) << 16;
    float peak;
    __builtin_memcpy(&peak, &wide, sizeof peak);
    return range_up_to(peak);
}

// A value is about q * scale, with q the whole number nearest to value * inverse.
struct Steps {
    float scale, inverse;
};

// Powers of two by which the largest magnitude becomes 2^bits or nearly. `beyond` is added to the
// bits of that magnitude, so that a carry makes the step larger where the digits would not hold it.
inline Steps powers_of_two(Range range, uint32_t beyond, uint32_t bits) {
    const float largest = range.high > -range.low ? range.high : -range.low;
    uint32_t most;
    __builtin_memcpy(&most, &largest, sizeof most);
    const uint32_t exponent = (most + beyond) >> 23 & 255;
    const uint32_t of_step = exponent > bits ? exponent - bits : 1;  // stays normal
    const uint32_t step_bits = of_step << 23, inverse_bits = (254 - of_step) << 23;
    Steps steps;
    __builtin_memcpy(&steps.scale, &step_bits, sizeof step_bits);
    __builtin_memcpy(&steps.inverse, &inverse_bits, sizeof inverse_bits);
    steps.scale += range.nothing;
    return steps;
}

// Below this, 1 / scale would be infinite: such numbers count as zeros.
constexpr float kTiny = 1e-30f;

// `most`: the largest number.
inline Steps steps_up_to(float most, Range range) {
    const float largest = range.high > -range.low ? range.high : -range.low;
    if (largest < kTiny) return {range.nothing, 0};
    return {largest / most + range.nothing, most / largest};
}
inline Steps byte_steps(Range range) { return steps_up_to(127, range); }

// The value of largest magnitude (the positive one of two) becomes -8, so that all of -8..7 is in
// use. The scale is rounded to bf16, in which it is stored, first.
inline Steps nibble_steps(Range range) {
    const float extreme = range.high >= -range.low ? range.high : range.low;
    if (extreme < kTiny && -extreme < kTiny) return {range.nothing, 0};
    const float scale = first(rounded(BF16{}, splat(extreme / -8.0f))) + range.nothing;
    return {scale, 1.0f / scale};
}

// The low bytes of the nearest whole numbers of 16 values within -128..127.
inline void store_bytes(int8_t* to, F32 v) {
    const F32 shifted = add(v, splat(12582912.0f));  // 1.5 * 2^23, whose low byte is 0
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted.v)));
#else
    float lanes[kLanes];
    uint32_t bits[kLanes];
    store(lanes, shifted);
    __builtin_memcpy(bits, lanes, sizeof bits);
    for (int64_t i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(bits[i] & 0xff);
#endif
}

// `to` has room for whole vectors; what is beyond the end is 0.
template <class E>
inline void quantize(const E* x, int64_t count, float inverse, float low, float high, int8_t* to) {
    each(count, [&](auto lanes, int64_t i) {
        const F32 v = mul(get(lanes, x + i), splat(inverse));
        store_bytes(to + i, min(splat(high), max(splat(low), v)));
    });
}

// The same of values that the steps are of: once rounded they are within.
template <class E>
inline void quantize_within(const E* x, int64_t count, float inverse, int8_t* to) {
    each(count, [&](auto lanes, int64_t i) {
        store_bytes(to + i, mul(get(lanes, x + i), splat(inverse)));
    });
}

}  // namespace quire::QUIRE_LEVEL
