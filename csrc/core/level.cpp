#include "core/level.hpp"

#include <array>
#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quire {
namespace {

constexpr std::array kAll = {Level::portable, Level::avx2,        Level::avx_vnni,
                             Level::avx512,   Level::avx512_vnni, Level::avx512_bf16};

#if defined(__x86_64__)

struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // zeros where there is no such leaf
    return r;
}

// Register states that the operating system saves (XCR0); 0 without XSAVE.
uint64_t saved_states() {
    if (!(cpuid(1, 0).c >> 27 & 1)) return 0;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

std::string x86_refusal(Level level) {
    struct Need {
        Level from;
        bool has;
        const char* what;
    };
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
    const uint64_t saved = saved_states();
    const Need needs[] = {
        {Level::avx2, bool(seven.b >> 5 & 1), "the CPU has no AVX2"},
        {Level::avx2, bool(one.c >> 12 & 1), "the CPU has no FMA"},
        {Level::avx2, bool(one.c >> 29 & 1), "the CPU has no F16C"},
        {Level::avx2, (saved & 0x6) == 0x6, "the operating system does not save AVX registers"},
        {Level::avx_vnni, bool(more.a >> 4 & 1), "the CPU has no AVX-VNNI"},
        {Level::avx512, bool(seven.b >> 16 & 1), "the CPU has no AVX-512"},
        {Level::avx512, bool(seven.b >> 17 & 1), "the CPU has no AVX-512 DQ"},
        {Level::avx512, bool(seven.b >> 30 & 1), "the CPU has no AVX-512 BW"},
        {Level::avx512, bool(seven.b >> 31 & 1), "the CPU has no AVX-512 VL"},
        {Level::avx512, (saved & 0xe6) == 0xe6,
         "the operating system does not save AVX-512 registers"},
        {Level::avx512_vnni, bool(seven.c >> 11 & 1), "the CPU has no AVX-512 VNNI"},
        {Level::avx512_bf16, bool(more.a >> 5 & 1), "the CPU has no AVX-512 BF16"},
    };
    for (const Need& need : needs)
        if (includes(level, need.from) && !need.has) return need.what;
    return "";
}

#endif

// Processors with AMX start a product of 16 pairs of bfloat16 (vdpbf16ps) every second cycle and
// two fp32 multiply-adds of 16 lanes in each, so that widening first is up to 1.4 times as fast.
bool has_slow_products(Level level) {
#if defined(__x86_64__)
    return level == Level::avx512_bf16 && (cpuid(7, 0).d >> 22 & 1);
#else
    return false;
#endif
}

}  // namespace

const char* name(Level level) {
    switch (level) {
        case Level::portable: return "portable";
        case Level::avx2: return "avx2";
        case Level::avx_vnni: return "avx_vnni";
        case Level::avx512: return "avx512";
        case Level::avx512_vnni: return "avx512_vnni";
        case Level::avx512_bf16: return "avx512_bf16";
    }
    return "";
}

std::vector<Level> compiled_levels() {
#if defined(__x86_64__)
    return {kAll.begin(), kAll.end()};
#else
    return {Level::portable};
#endif
}

std::string refusal(Level level) {
    if (level == Level::portable) return "";
#if defined(__x86_64__)
    return x86_refusal(level);
#else
    return "it is for x86-64";
#endif
}

Level best_level() {
    Level best = Level::portable;
    for (Level level : compiled_levels())
        if (refusal(level).empty() && !has_slow_products(level)) best = level;
    return best;
}

Level find_level(const std::string& wanted) {
    std::string usable, reason;
    for (Level level : kAll) {
        const std::string why = refusal(level);
        if (wanted == name(level) && why.empty()) return level;
        if (wanted == name(level)) reason = why + "; ";
        if (why.empty()) usable += (usable.empty() ? "" : ", ") + std::string(name(level));
    }
    throw std::invalid_argument(reason + "this machine runs " + usable);
}

}  // namespace quire
