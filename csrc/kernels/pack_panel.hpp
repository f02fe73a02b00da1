// Packing a panel of a weight [out, in].
//
// A panel is kPanel outputs, a pair of inputs at a time: [in / 2][kPanel][2] for bf16, so that a
// pair lies in 32 bits, and [in / 2][2][kPanel] for fp16 and fp32. Outputs and inputs beyond the
// end are zero.
#pragma once

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"
#include "kernels/scan.hpp"
#include "kernels/transpose.hpp"

namespace quire::QUIRE_LEVEL {

// Inputs first..stop-1 of an output, first being even.
template <class E>
inline void pack_run(E* panel, int64_t lane, const E* row, int64_t first, int64_t stop) {
    int64_t i = first;
    if constexpr (__is_same(E, BF16))  // a pair is one word
        for (; i + 2 <= stop; i += 2) __builtin_memcpy(panel + place_of<E>(lane, i), row + i, 4);
    for (; i < stop; ++i) panel[place_of<E>(lane, i)] = row[i];
}

// Inputs that are packed at once: a line of each row, and so few lines of the panel that they stay
// in the cache until all rows have filled them.
constexpr int64_t kPacked = 32;

#if defined(__AVX512F__)
// A look for NaN among words that pass by: the largest magnitude, as in has_nan().
template <class E>
struct Passing {
    static constexpr bool kLooks = true;
    __m512i most = _mm512_setzero_si512();

    void look(__m512i words) {
        if constexpr (sizeof(E) == 2) {
            const __m512i bits = _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
            most = _mm512_max_epi16(most, bits);
        } else {
            const __m512i bits = _mm512_and_si512(words, _mm512_set1_epi32(0x7fffffff));
            most = _mm512_max_epi32(most, bits);
        }
    }
    bool has_nan() const {
        if constexpr (sizeof(E) == 2)
            return _mm512_cmpgt_epi16_mask(most, _mm512_set1_epi16(0x7f80)) != 0;
        else
            return _mm512_cmpgt_epi32_mask(most, _mm512_set1_epi32(0x7f800000)) != 0;
    }
    void transpose(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line, Reuse reuse) {
        transpose_tile(from, stride, to, line, Flip{0}, reuse, [&](__m512i a) { look(a); });
    }
};
#else
template <class E>
struct Passing {
    static constexpr bool kLooks = false;
    bool has_nan() const { return false; }
    void transpose(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line, Reuse reuse) {
        transpose_tile(from, stride, to, line, Flip{0}, reuse);
    }
};
#endif

// The inputs that were packed as tiles of words: pairs of bf16, or numbers of fp32. The rows of a
// tile are read from beginning to end: as many streams as the hardware keeps ahead of, which twice
// as many are not.
template <class E>
inline int64_t pack_tiles(const PackArgs& a, const PanelOutputs& outputs, Lanes lanes, E* to,
                          Reuse reuse, Passing<E>& passing) {
    constexpr int64_t per_word = 4 / sizeof(E);
    if constexpr (sizeof(E) == 2 && !__is_same(E, BF16)) return 0;
    if (lanes.begin != 0 || lanes.end != kPanel) return 0;
    constexpr int64_t of_tile = kTile * per_word, line = kPanel * 4;
    const int64_t stop = a.weight.in / of_tile * of_tile;
    const int64_t row = outputs.first - a.outputs.first;
    const auto* from = reinterpret_cast<const uint8_t*>(row_of<E>(a.source, row, 0));
    const int64_t stride = a.source.token_stride * sizeof(E);
    auto* place = reinterpret_cast<uint8_t*>(to);
    const int64_t tiles = stop / of_tile;
    for (int64_t half = 0; half < kPanel / kTile; ++half, from += kTile * stride)
        for (int64_t i = 0; i < tiles; ++i)
            passing.transpose(from + i * kTileBytes, stride,
                              place + i * kTile * line + half * kTileBytes, line, reuse);
    finish_lines();
    return stop;
}

// A panel, or the outputs of it that the source has. reuse: of the panel.
template <class E>
inline void pack_panel(const PackArgs& a, int64_t panel, Reuse reuse = Reuse::late) {
    const int64_t in = a.weight.in, even_in = (in + 1) / 2 * 2;
    const PanelOutputs outputs(a.weight, panel);
    const Lanes lanes = outputs.lanes_of(a.outputs);
    if (lanes.begin == lanes.end) return;
    E* to = static_cast<E*>(a.panels) + panel * even_in * kPanel;
    Passing<E> passing;
    if (!passing.kLooks) note_nan<E>(a, outputs, lanes);
    const int64_t tiled = pack_tiles(a, outputs, lanes, to, reuse, passing);
    if (passing.kLooks) note_nan<E>(a, outputs, lanes, tiled);
    if (a.has_nan != nullptr && passing.has_nan())
        __atomic_store_n(a.has_nan, 1, __ATOMIC_RELAXED);
    for (int64_t k = tiled; k < in; k += kPacked) {
        const int64_t stop = k + kPacked < in ? k + kPacked : in;
        for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
            const int64_t row = outputs.first + lane - a.outputs.first;
            pack_run(to, lane, row_of<E>(a.source, row, 0), k, stop);
        }
    }
    // The memory may be used again, so zeros are written: after the last output with its source.
    const int64_t end = lanes.end == outputs.count ? kPanel : lanes.end;
    for (int64_t lane = lanes.begin; lane < end; ++lane)
        for (int64_t i = lane < outputs.count ? in : 0; i < even_in; ++i)
            to[place_of<E>(lane, i)] = E{};
}

}  // namespace quire::QUIRE_LEVEL
