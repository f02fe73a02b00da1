// How panels of weights that a checkpoint stores as codes lie in memory.
//
// A panel is kPanel outputs: first the codes, then the scales of each group [groups][kPanel], then
// its zero points [groups][kPanel] as bytes, if there are any. Codes are words of 32 bits, one for
// each output, so that a vector is [16 outputs]: eight inputs of four bits, of which the even ones
// are the lower half of a word and the odd ones the upper half, or four inputs of eight bits, in
// order. A segment's last group may have fewer inputs than the others; it takes the same room.
#pragma once

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"
#include "kernels/quantize.hpp"

namespace quire::QUIRE_LEVEL {

constexpr int64_t kWordLine = kPanel * sizeof(uint32_t);  // a word of each output

struct CodedPanel {
    int64_t bits, group, groups, scale_bytes;
    bool has_zeros;

    explicit CodedPanel(const PackedWeight& w)
        : bits(bits_of(w.form)),
          group(w.group),
          groups((w.in + w.group - 1) / w.group),
          scale_bytes(size_of(w.scale_type)),
          has_zeros(w.has_zeros) {}

    int64_t group_bytes() const { return group * bits / 8 * kPanel; }  // of codes
    int64_t scales() const { return groups * group_bytes(); }
    int64_t zeros() const { return scales() + groups * kPanel * scale_bytes; }
    int64_t bytes() const { return round_up(zeros() + has_zeros * groups * kPanel, kLine); }
};

// The first of some panels at some group, for so many rows: `apart` bytes from one panel to the
// next. is_read_once: see fetch_weights.
struct GroupAt {
    const uint8_t* codes;
    const char* scales;
    const uint8_t* zeros;
    int64_t apart;
    Type scale_type;
    bool is_read_once;

    GroupAt(const PackedWeight& w, const CodedPanel& panel, int64_t first, int64_t group,
            int64_t rows)
        : codes(static_cast<const uint8_t*>(w.panels) + first * panel.bytes()),
          scales(reinterpret_cast<const char*>(codes) + panel.scales()),
          zeros(codes + panel.zeros()),
          apart(panel.bytes()),
          scale_type(w.scale_type),
          is_read_once(w.is_streamed && rows == 1) {
        move(panel, group);
    }

    void move(const CodedPanel& panel, int64_t groups) {
        codes += groups * panel.group_bytes();
        scales += groups * kPanel * panel.scale_bytes;
        zeros += groups * kPanel;
    }
};

inline F32 scales_at(const GroupAt& at, int64_t panel, int64_t lane) {
    const char* scales = at.scales + panel * at.apart;
    return with_type(at.scale_type, [&](auto type) {
        return load(reinterpret_cast<const decltype(type)*>(scales) + lane);
    });
}

constexpr int64_t kAhead = 4096;  // bytes that are fetched ahead: far enough for the memory

}  // namespace quire::QUIRE_LEVEL
