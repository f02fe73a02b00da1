// The kernels of each level.
#pragma once

#include "core/level.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// The functions to run at the level: its own, and those of the levels before where it has none.
Kernels kernels_for(Level level);

// The product with a weight of this form and type.
inline Kernel<LinearArgs> product_with(const PackedWeight& weight, const Kernels& kernels) {
    switch (weight.form) {
        case WeightForm::plain: return kernels.linear[static_cast<int>(weight.type)];
        case WeightForm::codes4:
        case WeightForm::codes8:
        case WeightForm::floats8:
        case WeightForm::table4: return kernels.linear_coded;
        default:
            return weight.is_weight_only ? kernels.linear_dequantized : kernels.linear_quantized;
    }
}

}  // namespace quire
