// Packing the codes of a checkpoint into panels, once at load; coded_panel.hpp says how they look.

#include "kernels/coded_panel.hpp"
#include "kernels/kernels.hpp"
#include "kernels/product.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Eight codes of four bits, two in a byte, the even one in its lower half, as a word: the four even
// ones, then the four odd ones.
inline uint32_t word_of_nibbles(uint32_t bytes) {
    const auto together = [](uint32_t nibbles) {
        nibbles &= 0x0f0f0f0fu;
        nibbles = (nibbles | nibbles >> 4) & 0x00ff00ffu;
        return (nibbles | nibbles >> 8) & 0xffffu;
    };
    return together(bytes) | together(bytes >> 4) << 16;
}

// Words are filled for all outputs before the next ones, so that the panel is written in order.
inline void pack_codes(const PackCodedArgs& a, PanelOutputs outputs, uint8_t* to) {
    const bool are_nibbles = bits_of(a.weight.form) == 4;
    const int64_t row = are_nibbles ? (a.weight.in + 1) / 2 : a.weight.in;
    const uint8_t* from = a.codes + outputs.first * row;
    for (int64_t i = 0; i < row; i += 4, to += kWordLine)
        for (int64_t lane = 0; lane < outputs.count; ++lane) {
            uint32_t word = 0;
            __builtin_memcpy(&word, from + lane * row + i, row - i < 4 ? row - i : 4);
            if (are_nibbles) word = word_of_nibbles(word);
            __builtin_memcpy(to + lane * 4, &word, 4);
        }
}

// From [outputs][groups] to [groups][kPanel].
inline void pack_groups(const void* source, int64_t bytes, int64_t groups, PanelOutputs outputs,
                        uint8_t* to) {
    const auto* from = static_cast<const uint8_t*>(source) + outputs.first * groups * bytes;
    for (int64_t lane = 0; lane < outputs.count; ++lane)
        for (int64_t g = 0; g < groups; ++g, from += bytes)
            __builtin_memcpy(to + (g * kPanel + lane) * bytes, from, bytes);
}

Status pack(const PackCodedArgs& a, int64_t, Pool& pool) {
    const CodedPanel panel(a.weight);
    parallel(pool, num_panels(a.weight), [&](int64_t i, int) {
        const PanelOutputs outputs(a.weight, i);
        uint8_t* to = a.panels + i * panel.bytes();
        pack_codes(a, outputs, to);
        pack_groups(a.scales, panel.scale_bytes, panel.groups, outputs, to + panel.scales());
        if (panel.has_zeros) pack_groups(a.zeros, 1, panel.groups, outputs, to + panel.zeros());
    });
    return Status::ok;
}

}  // namespace

void fill_coded_pack(Kernels& table) { table.pack_coded = pack; }

}  // namespace quire::QUIRE_LEVEL
