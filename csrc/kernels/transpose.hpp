// Words of 4 bytes from rows into columns, as panels of weights have them: 16 words of each of 16
// rows become 16 lines of 64 bytes.
//
// A line is written past the caches where it lies on a border of 64 bytes, unless it is read soon:
// weights are larger than these, and memory that is written so is not read first. `finish_lines`
// makes such lines visible to other threads.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kTile = 16;  // words of a row, and rows
constexpr int64_t kTileBytes = kTile * 4;

// When the lines are read again.
enum class Reuse { late, soon };

// What all of the words are xor-ed with: 0 leaves them.
struct Flip {
    uint32_t bits;
};

inline bool is_on_line(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 63) == 0; }

#if defined(__AVX512F__)

inline void write_line(void* to, __m512i words, bool is_past) {
    if (is_past)
        _mm512_stream_si512(static_cast<__m512i*>(to), words);
    else
        _mm512_storeu_si512(to, words);
}

// Rows are `stride` bytes apart, lines `line` bytes. look: gets the words of each row.
template <class Look>
inline void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line,
                           Flip flip, Reuse reuse, Look&& look) {
    __m512i a[16], b[16];
    const __m512i bits = _mm512_set1_epi32(static_cast<int>(flip.bits));
    const bool is_past = reuse == Reuse::late && is_on_line(to) && is_on_line(to + line);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        a[i] = _mm512_loadu_si512(from + i * stride);
        look(a[i]);
        a[i] = _mm512_xor_si512(a[i], bits);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 r + c]: word c of each quarter, of rows 4 r to 4 r + 3
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        write_line(to + c * line, _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88), is_past);
        write_line(to + (4 + c) * line, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88),
                   is_past);
        write_line(to + (8 + c) * line, _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd), is_past);
        write_line(to + (12 + c) * line, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd),
                   is_past);
    }
}

inline void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line,
                           Flip flip, Reuse reuse = Reuse::late) {
    transpose_tile(from, stride, to, line, flip, reuse, [](__m512i) {});
}

inline void finish_lines() { _mm_sfence(); }

#elif defined(__AVX2__)

// Eight rows of eight words.
inline void transpose_part(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line,
                           Flip flip) {
    __m256i a[8], b[8];
    const __m256i bits = _mm256_set1_epi32(static_cast<int>(flip.bits));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        a[i] = _mm256_xor_si256(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * stride)), bits);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m256i low = _mm256_permute2x128_si256(a[c], a[4 + c], 0x20);
        const __m256i high = _mm256_permute2x128_si256(a[c], a[4 + c], 0x31);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + c * line), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (4 + c) * line), high);
    }
}

inline void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line,
                           Flip flip, Reuse = Reuse::late) {
    for (int64_t row = 0; row < kTile; row += 8)
        for (int64_t word = 0; word < kTile; word += 8)
            transpose_part(from + row * stride + word * 4, stride, to + word * line + row * 4, line,
                           flip);
}

inline void finish_lines() {}

#else

inline void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to, int64_t line,
                           Flip flip, Reuse = Reuse::late) {
    for (int64_t word = 0; word < kTile; ++word)
        for (int64_t row = 0; row < kTile; ++row) {
            uint32_t bits;
            __builtin_memcpy(&bits, from + row * stride + word * 4, 4);
            bits ^= flip.bits;
            __builtin_memcpy(to + word * line + row * 4, &bits, 4);
        }
}

inline void finish_lines() {}

#endif

}  // namespace quire::QUIRE_LEVEL
