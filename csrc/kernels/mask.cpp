#include "kernels/mask.hpp"

#include <math.h>

namespace quire {
namespace {

constexpr int64_t kBitsPerWord = 32;
constexpr int64_t kWordsPerTile = 512;  // 64 KiB of logits: some microseconds

// Entries [first, stop) of a row, whose bits are in `bits` from the lowest on.
void mask_word(uint32_t bits, float* first, const float* stop) {
    for (; first < stop; ++first, bits >>= 1)
        if (!(bits & 1)) *first = -INFINITY;
}

void mask_words(const MaskArgs& a, int64_t index, int64_t word, int64_t stop) {
    float* row = a.logits + a.rows[index] * a.stride;
    const int32_t* words = a.words + index * a.words_stride;
    for (; word < stop; ++word) {
        if (words[word] == -1) continue;
        const int64_t first = word * kBitsPerWord, end = first + kBitsPerWord;
        if (words[word] == 0 && end <= a.width) {  // most of them: stores without a decision
            for (int64_t i = 0; i < kBitsPerWord; ++i) row[first + i] = -INFINITY;
            continue;
        }
        mask_word(static_cast<uint32_t>(words[word]), row + first,
                  row + (end < a.width ? end : a.width));
    }
}

}  // namespace

Status mask_logits(const MaskArgs& a, int64_t tokens, Pool& pool) {
    for (int64_t i = 0; i < tokens; ++i)
        if (a.rows[i] < 0 || a.rows[i] >= a.num_rows) return Status::bad_index;
    const int64_t num_words = (a.width + kBitsPerWord - 1) / kBitsPerWord;
    const int64_t per_row = (num_words + kWordsPerTile - 1) / kWordsPerTile;
    parallel(pool, tokens * per_row, [&](int64_t tile, int) {
        const int64_t first = tile % per_row * kWordsPerTile, end = first + kWordsPerTile;
        mask_words(a, tile / per_row, first, end < num_words ? end : num_words);
    });
    return Status::ok;
}

}  // namespace quire
