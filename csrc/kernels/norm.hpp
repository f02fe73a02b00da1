// One row's norm.
#pragma once

#include "kernels/element.hpp"

namespace quire::QUIRE_LEVEL {

// y = norm(x) of `width` elements, with the parameters of row `row` of a token; y may be x.
template <class E>
using NormRow = void (*)(const E* x, E* y, int64_t width, const NormParams& p, int64_t row);

// The norm of a kind (norm.cpp); a call through a pointer is little beside a row.
template <class E>
NormRow<E> norm_row_of(NormKind kind);

}  // namespace quire::QUIRE_LEVEL
