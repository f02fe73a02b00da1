// Rows of activations as the numbers of a type times their scales, in fp32.
//
// ops/formats/row_rounding.py is the definition; the numbers are the same, bit for bit.
#pragma once

#include "kernels/quantize.hpp"

namespace quire::QUIRE_LEVEL {

// The nearest number of e4m3 for |v| <= 448, ties to even: added to 1.5 * 2^23 steps, v keeps whole
// steps. There are eight from a power of two to the next, and below 2^-6 they stay as they are.
inline float nearest_float(float v) {
    uint32_t bits;
    __builtin_memcpy(&bits, &v, sizeof bits);
    bits &= 0x7f800000u;
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    const float least = 1.0f / 64, magic = (power > least ? power : least) * 1572864.0f;
    return (v + magic) - magic;
}
inline float nearest_integer(float v) { return (v + 12582912.0f) - 12582912.0f; }

template <class Nearest>
inline void round_values(float* x, int64_t count, Steps steps, float most, const Nearest& nearest) {
    for (int64_t i = 0; i < count; ++i) {
        float v = x[i] * steps.inverse;
        v = v > most ? most : v;
        v = v < -most ? -most : v;
        x[i] = nearest(v) * steps.scale;
    }
}

// A row of `count` values in place. peak: of the row that they are a part of, or null.
inline void round_row(float* x, int64_t count, const RowRounding& how, const float* peak) {
    const bool are_floats = how.to == RowType::floats;
    const float most = are_floats ? 448 : 127;
    const int64_t group = how.group == 0 || how.scale != 0 ? count : how.group;
    for (int64_t first = 0; first < count; first += group) {
        const int64_t size = count - first < group ? count - first : group;
        const bool is_part = how.group == 0 && peak != nullptr;
        const Steps steps = how.scale != 0 ? Steps{how.scale, 1 / how.scale}
                                           : steps_up_to(most, is_part ? range_up_to(*peak)
                                                                       : range_of(x + first, size));
        if (are_floats)
            round_values(x + first, size, steps, most, nearest_float);
        else
            round_values(x + first, size, steps, most, nearest_integer);
    }
}

}  // namespace quire::QUIRE_LEVEL
