// The kernels of each level.
#pragma once

#include "core/level.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// The functions to run at the level: its own, and those of the levels before where it has none.
Kernels kernels_for(Level level);

// The product with a weight in codes: in whole numbers where the level has it for such a weight and
// its rows. What the rows are does not matter, or they would not have the same bits in any company.
inline ProductKernels product_with_codes(const PackedWeight& weight, const Kernels& kernels) {
    const bool keeps_16_bits = weight.type != Type::f32 && weight.rounding.to == RowType::kept;
    if (!keeps_16_bits || weight.group < kernels.digit_group) return kernels.linear_coded;
    const auto of_digits = weight.form == WeightForm::codes4   ? kernels.linear_digits4
                           : weight.form == WeightForm::codes8 ? kernels.linear_digits8
                                                               : ProductKernels{};
    return of_digits.linear != nullptr ? of_digits : kernels.linear_coded;
}

// The product with a weight of this form and type.
inline ProductKernels product_with(const PackedWeight& weight, const Kernels& kernels) {
    switch (weight.form) {
        case WeightForm::plain: return kernels.linear[static_cast<int>(weight.type)];
        case WeightForm::codes4:
        case WeightForm::codes8:
        case WeightForm::floats8:
        case WeightForm::table4: return product_with_codes(weight, kernels);
        default:
            return weight.is_weight_only ? kernels.linear_dequantized : kernels.linear_quantized;
    }
}

}  // namespace quire
