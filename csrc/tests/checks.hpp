// What the test programs share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/level.hpp"
#include "kernels/tables.hpp"

namespace quire {

inline constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::f16};

inline void require(bool condition, const std::string& what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// check(level) for each that this machine runs; prints those that passed, and why others do not
// run.
template <class Check>
void check_levels(const Check& check) {
    for (Level level : compiled_levels()) {
        const std::string why = refusal(level);
        if (why.empty()) check(level);
        std::printf("%s: %s\n", name(level), why.empty() ? "passed" : why.c_str());
    }
}

}  // namespace quire
