// The kernels of each level.
#pragma once

#include "core/level.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// The functions to run at the level: its own, and those of the levels before where it has none.
Kernels kernels_for(Level level);

// The product with a weight of this form and type.
inline Kernel<LinearArgs> product_with(const PackedWeight& weight, const Kernels& kernels) {
    if (weight.form == WeightForm::plain) return kernels.linear[static_cast<int>(weight.type)];
    if (weight.form == WeightForm::codes4 || weight.form == WeightForm::codes8)
        return kernels.linear_coded;
    return weight.is_weight_only ? kernels.linear_dequantized : kernels.linear_quantized;
}

}  // namespace quire
