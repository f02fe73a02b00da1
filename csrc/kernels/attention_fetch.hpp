// What of KV memory is fetched before it is read: tiles of blocks in any order are too short for
// the hardware to foresee.
//
// While products with the keys of a segment are computed, its values are fetched, and with the
// values the keys of the next segment.
#pragma once

#include "kernels/attention_keys.hpp"

namespace quire::QUIRE_LEVEL {

// Fetch a line into the second cache: more of them may be under way than to the first one.
inline void fetch_early(const void* line) { __builtin_prefetch(line, 0, 2); }

// Processors drop what is to be fetched where too much is under way, so that lines get a second
// chance shortly before they are read: this many lines of a tile ahead.
constexpr int64_t kNear = 8;

// The lines of a segment's tiles, to be fetched before they are read: eight of each in turns, of
// every kApart-th tile first and then of those after them, since memory is read best in several
// streams, none of which shares its page with another.
template <int kApart>
class Ahead {
   public:
    // Tiles of so many bytes, or null.
    Ahead(const void* const* tiles, int64_t bytes)
        : tiles_(reinterpret_cast<const char* const*>(tiles)), runs_((bytes + 511) / 512) {}

    // N more; always the same divisor of eight. What comes after the last is arbitrary memory.
    template <int N>
    void fetch() {
        fetch_lines<N>(tiles_[tile_] + run_ * 512 + part_ * kLineBytes);
        part_ = (part_ + N) % 8;
        if (part_ != 0) return;
        tile_ += kApart;
        if (tile_ < kTilesOfSegment) return;
        tile_ %= kApart;
        if (++run_ < runs_) return;
        run_ = 0;
        tile_ = (tile_ + 1) % kApart;
    }

   private:
    template <int N>
    static void fetch_lines(const char* at) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) fetch_early(at + i * kLineBytes);
    }

    const char* const* tiles_;
    int64_t runs_;
    int64_t tile_ = 0, run_ = 0, part_ = 0;
};

}  // namespace quire::QUIRE_LEVEL
