// The instruction sets that kernels are compiled for, and which of them this machine can run.
#pragma once

#include <string>
#include <vector>

namespace quire {

// In order: whoever runs one level runs all before it.
enum class Level { portable, avx2, avx512, avx512_vnni, avx512_bf16 };

const char* name(Level level);

// All levels that this binary has code for.
std::vector<Level> compiled_levels();

// Why this machine cannot run the level; empty if it can. The operating system has a say: it must
// save the wide registers (XCR0).
std::string refusal(Level level);

// The last compiled level without a refusal.
Level best_level();

// The level of a name. Throws std::invalid_argument for a name or a level that cannot be used here,
// with a sentence that says which can.
Level find_level(const std::string& wanted);

}  // namespace quire
