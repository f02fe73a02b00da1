// The instruction sets that kernels are compiled for, and which of them this machine can run.
#pragma once

#include <string>
#include <vector>

namespace quire {

// From the slowest to the fastest.
enum class Level { portable, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16 };

// Whether a level has what another one has: itself and those before it, but for avx_vnni, which
// stands beside those of AVX-512.
constexpr bool includes(Level level, Level part) {
    return part <= level && (part != Level::avx_vnni || level == Level::avx_vnni);
}

const char* name(Level level);

// All levels that this binary has code for.
std::vector<Level> compiled_levels();

// Why this machine cannot run the level; empty if it can. The operating system has a say: it must
// save the wide registers (XCR0).
std::string refusal(Level level);

// The fastest compiled level without a refusal: the last one, but for products of bfloat16 that are
// slower than those of fp32.
Level best_level();

// The level of a name. Throws std::invalid_argument for a name or a level that cannot be used here,
// with a sentence that says which can.
Level find_level(const std::string& wanted);

}  // namespace quire
