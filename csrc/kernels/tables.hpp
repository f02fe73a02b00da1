// The kernels of each level.
#pragma once

#include "core/level.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// The functions to run at the level: its own, and those of the levels before where it has none.
Kernels kernels_for(Level level);

}  // namespace quire
