// Copies of 64 bytes past the caches, which keep what steps use.
#pragma once

#include <cstddef>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace quire {

inline constexpr size_t kLineBytes = 64;

// `to` is aligned to kLineBytes. static, since each instruction set compiles one of its own.
static inline void copy_line_past_caches(const void* from, void* to) {
#if defined(__SSE2__)
#pragma GCC unroll 4
    for (size_t i = 0; i < kLineBytes / sizeof(__m128i); ++i)
        _mm_stream_si128(static_cast<__m128i*>(to) + i,
                         _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
#else
    std::memcpy(to, from, kLineBytes);
#endif
}

// What was copied is seen by others before what is written later.
static inline void end_copies_past_caches() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace quire
