// Element types in memory. Arithmetic is in fp32 vectors (vec.hpp).
#pragma once

#include "kernels/kernels.hpp"

namespace quire::QUIRE_LEVEL {

struct BF16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

template <class E>
inline E* row_of(const Rows& rows, int64_t token, int64_t row) {
    return static_cast<E*>(rows.data) + token * rows.token_stride + row * rows.row_stride;
}

// Call `body` with a value of the type that `type` names.
template <class Body>
inline auto with_type(Type type, const Body& body) {
    switch (type) {
        case Type::bf16: return body(BF16{});
        case Type::f16: return body(F16{});
        default: return body(float{});
    }
}

}  // namespace quire::QUIRE_LEVEL
