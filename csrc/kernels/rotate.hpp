// Rotary embedding of a head; roundings are those of ops/rotary.py.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

// (a, b) = (a cos - b sin, b cos + a sin); the products are rounded.
template <class E>
inline void turn(F32 cos, F32 sin, F32& a, F32& b) {
    const E type{};
    const F32 turned = sub(rounded(type, mul(a, cos)), rounded(type, mul(b, sin)));
    b = add(rounded(type, mul(b, cos)), rounded(type, mul(a, sin)));
    a = turned;
}

// The pairs of a head are half its rotating part apart.
template <class E>
inline void rotate_halves(E* x, int64_t half, const E* cos, const E* sin) {
    each(half, [&](auto lanes, int64_t i) {
        F32 a = get(lanes, x + i), b = get(lanes, x + half + i);
        turn<E>(get(lanes, cos + i), get(lanes, sin + i), a, b);
        put(lanes, x + i, a);
        put(lanes, x + half + i, b);
    });
}

// The pairs are neighbours.
template <class E>
inline void rotate_neighbours(E* x, int64_t half, const E* cos, const E* sin) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t count = half - i < kLanes ? half - i : kLanes;
        E first[kLanes] = {}, second[kLanes] = {};
        for (int64_t j = 0; j < count; ++j) {
            first[j] = x[2 * (i + j)];
            second[j] = x[2 * (i + j) + 1];
        }
        F32 a = load(first), b = load(second);
        turn<E>(load_part(cos + i, count), load_part(sin + i, count), a, b);
        store(first, a);
        store(second, b);
        for (int64_t j = 0; j < count; ++j) {
            x[2 * (i + j)] = first[j];
            x[2 * (i + j) + 1] = second[j];
        }
    }
}

// Cosines and sines of a token, rounded to the type, in `memory` of `dim` elements.
template <class E>
struct Angles {
    const E *cos, *sin;
    int64_t half;
    bool is_interleaved;

    Angles(const float* cos_sin, int64_t dim, bool pairs_neighbours, E* memory)
        : cos(memory), sin(memory + dim / 2), half(dim / 2), is_interleaved(pairs_neighbours) {
        each(dim, [&](auto lanes, int64_t i) { put(lanes, memory + i, get(lanes, cos_sin + i)); });
    }
    void rotate(E* head) const {
        if (is_interleaved)
            rotate_neighbours(head, half, cos, sin);
        else
            rotate_halves(head, half, cos, sin);
    }
};

}  // namespace quire::QUIRE_LEVEL
