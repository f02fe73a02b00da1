// Packing a weight [out, in] into panels, once at load.
//
// A panel is kPanel outputs, a pair of inputs at a time: [in / 2][kPanel][2] for bf16, so that a
// pair lies in 32 bits, and [in / 2][2][kPanel] for fp16 and fp32. Outputs and inputs beyond the
// end are zero.

#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/pairs.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Inputs first..stop-1 of an output, first being even.
template <class E>
inline void pack_run(E* panel, int64_t lane, const E* row, int64_t first, int64_t stop) {
    int64_t i = first;
    if constexpr (__is_same(E, BF16))  // a pair is one word
        for (; i + 2 <= stop; i += 2) __builtin_memcpy(panel + place_of<E>(lane, i), row + i, 4);
    for (; i < stop; ++i) panel[place_of<E>(lane, i)] = row[i];
}

// Inputs that are packed at once: a line of each row, and so few lines of the panel that they stay
// in the cache until all rows have filled them.
constexpr int64_t kPacked = 32;

template <class E>
inline void pack_panel(const PackArgs& a, int64_t panel) {
    const int64_t in = a.weight.in, even_in = (in + 1) / 2 * 2;
    const PanelOutputs outputs(a.weight, panel);
    const Lanes lanes = outputs.lanes_of(a.outputs);
    E* to = static_cast<E*>(a.panels) + panel * even_in * kPanel;
    for (int64_t k = 0; k < in; k += kPacked) {
        const int64_t stop = k + kPacked < in ? k + kPacked : in;
        for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
            const int64_t row = outputs.first + lane - a.outputs.first;
            pack_run(to, lane, row_of<E>(a.source, row, 0), k, stop);
        }
    }
    // The memory may be used again, so zeros are written: after the last output with its source.
    const int64_t end = lanes.end == outputs.count ? kPanel : lanes.end;
    for (int64_t lane = lanes.begin; lane < end; ++lane)
        for (int64_t i = lane < outputs.count ? in : 0; i < even_in; ++i)
            to[place_of<E>(lane, i)] = E{};
}

Status pack(const PackArgs& a, int64_t, Pool& pool) {
    with_type(a.weight.type, [&](auto type) {
        parallel(pool, num_panels(a.weight),
                 [&](int64_t panel, int) { pack_panel<decltype(type)>(a, panel); });
    });
    return Status::ok;
}

}  // namespace

void fill_linear_pack(Kernels& table) { table.pack = pack; }

}  // namespace quire::QUIRE_LEVEL
