// The masks of grammars, of one level: memory decides, so others would not be faster.
#pragma once

#include "kernels/kernels.hpp"

namespace quire {

// Entries of the rows named in `rows` [T] (each below num_rows) whose bit in words [T, ceil(width /
// 32)] is 0 become -inf. Bit i of word w is entry 32 * w + i.
struct MaskArgs {
    float* logits;
    int64_t stride;
    int64_t width;
    int64_t num_rows;
    const int64_t* rows;
    const int32_t* words;
    int64_t words_stride;
};

Status mask_logits(const MaskArgs& args, int64_t tokens, Pool& pool);

}  // namespace quire
