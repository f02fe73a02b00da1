// What the test programs share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// `count` numbers of either sign around 1, which follow from the seed.
inline void fill_numbers(unsigned char* to, Type type, int64_t count, uint32_t seed) {
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        const float value = static_cast<float>(static_cast<int32_t>(seed)) / 1e9f;
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        uint16_t half = static_cast<uint16_t>(bits >> 16);
        if (type == Type::f16) half = static_cast<uint16_t>((seed >> 16 & 0x83ff) | 0x3800);
        if (type == Type::f32) std::memcpy(to + i * 4, &bits, 4);
        if (type != Type::f32) std::memcpy(to + i * 2, &half, 2);
    }
}

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
