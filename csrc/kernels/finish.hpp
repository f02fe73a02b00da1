// What becomes of the sums of a product: bias, activation, gate, rounding.
//
// Compiled once for each kind of vectors (finish.cpp): products are compiled for every type and
// form of weight, and finishing their sums is the same for all of them.
#pragma once

#include "kernels/vec.hpp"

namespace quire::QUIRE_VECTORS {

// Finish kPanelWidth lanes from `lane` on of some rows, and overwrite their sums; row r's are at
// sums + r * stride, those of the other half of a gate kPanelWidth farther. `token` is the first
// row's.
void finish_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, float* sums,
                 int64_t stride);

// Ask for what adapters add to the same lanes, to be called before the sums are computed.
void prefetch_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane);

}  // namespace quire::QUIRE_VECTORS

namespace quire::QUIRE_LEVEL {

inline bool is_gate(FinishKind kind) {
    return kind == FinishKind::gated || kind == FinishKind::limited || kind == FinishKind::bounded;
}

}  // namespace quire::QUIRE_LEVEL
