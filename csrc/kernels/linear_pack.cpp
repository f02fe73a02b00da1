// Packing a weight [out, in] into panels, once at load; pack_panel.hpp says how they look.

#include "kernels/kernels.hpp"
#include "kernels/pack_panel.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

Status pack(const PackArgs& a, int64_t, Pool& pool) {
    with_type(a.weight.type, [&](auto type) {
        const Panels panels(a.weight, a.outputs);
        parallel(pool, panels.count,
                 [&](int64_t i, int) { pack_panel<decltype(type)>(a, panels.first + i); });
    });
    return Status::ok;
}

}  // namespace

void fill_linear_pack(Kernels& table) { table.pack = pack; }

}  // namespace quire::QUIRE_LEVEL
