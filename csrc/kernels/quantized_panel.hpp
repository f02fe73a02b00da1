// How panels of weights in small integers lie in memory.
//
// For every four inputs, [kPanel][4] bytes q + 128; or, for int4, 64 bytes that hold q + 8 of
// [16][4] for the first 16 outputs in their low halves, for the other 16 in their high halves, and
// after every group its scales, [kPanel] bf16. Inputs are filled up with zeros to a whole group.
#pragma once

#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"
#include "kernels/quantize.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kFour = 4;
constexpr int64_t kByteLine = kFour * kPanel;  // four inputs of a panel in int8
constexpr int64_t kPrefetch = 4096;            // bytes ahead: far enough for the memory

inline bool is_int4(const PackedWeight& w) { return w.form == WeightForm::int4; }

// Of an int4 weight.
inline int64_t groups_of(const PackedWeight& w) { return (w.in + w.group - 1) / w.group; }

// Of such a group with its scales.
inline int64_t group_bytes(int64_t group) { return group * kPanel / 2 + kPanel * sizeof(BF16); }

inline int64_t panel_bytes(const PackedWeight& w) {
    return is_int4(w) ? groups_of(w) * group_bytes(w.group) : round_up(w.in, kFour) * kPanel;
}

}  // namespace quire::QUIRE_LEVEL
