#include "kernels/finish.hpp"

#include "kernels/activation.hpp"
#include "kernels/lora.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// value(sums, lane of the panel) takes the place of the sums, 16 lanes at a time. Lanes beyond the
// last output hold what is never stored.
template <class Value>
inline void replace(float* sums, int64_t rows, int64_t stride, const Value& value) {
    for (int64_t r = 0; r < rows; ++r, sums += stride)
        for (int64_t i = 0; i < kPanelWidth; i += kLanes) store(sums + i, value(sums + i, i));
}

void add_adapters(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, int64_t count,
                  float* sums, int64_t stride) {
    const LoraBank& bank = a.lora.bank;
    const int64_t factors = bank.parts * bank.max_rank;
    for (int64_t r = token; r < token + rows; ++r, sums += stride)
        if (a.lora.slots[r] >= 0)
            add_lora(bank, a.lora.slots[r], a.lora.factors + r * factors, lane, count, sums);
}

// sums += bias, then what adapters add, then the rows' addends; kPanelWidth lanes from `lane` on.
void add_to(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, float* sums,
            int64_t stride) {
    if (a.weight.bias != nullptr)
        replace(sums, rows, stride, [&](const float* at, int64_t i) {
            return add(load(at), load(a.weight.bias + lane + i));
        });
    const int64_t left = a.weight.out - lane, count = left < kPanelWidth ? left : kPanelWidth;
    if (a.lora.factors != nullptr) add_adapters(a, token, rows, lane, count, sums, stride);
    if (a.addend.values == nullptr) return;
    for (int64_t r = 0; r < rows; ++r, sums += stride) {
        if (a.addend.rows[token + r] < 0) continue;
        const float* values = a.addend.values + a.addend.rows[token + r] * a.addend.stride + lane;
        each(count, [&](auto lanes, int64_t i) {
            put(lanes, sums + i, add(get(lanes, sums + i), get(lanes, values + i)));
        });
    }
}

void finish_plain(const LinearArgs& a, int64_t rows, float* sums, int64_t stride) {
    if (a.finish.act == Act::none) return;
    with_act(a.finish.act, [&](auto act) {
        replace(sums, rows, stride,
                [&](const float* at, int64_t) { return decltype(act)::of(load(at)); });
    });
}

void finish_gated(const LinearArgs& a, int64_t rows, float* sums, int64_t stride) {
    if (a.finish.kind == FinishKind::limited)
        return replace(sums, rows, stride, [&](const float* at, int64_t) {
            return limited(load(at), load(at + kPanelWidth), a.finish.scale);
        });
    const F32 high = splat(a.finish.scale), low = splat(-a.finish.scale);
    with_act(a.finish.act, [&](auto act) {
        if (a.finish.kind == FinishKind::bounded)
            return replace(sums, rows, stride, [&](const float* at, int64_t) {
                const F32 up = min(high, max(low, load(at + kPanelWidth)));
                return mul(min(high, decltype(act)::of(load(at))), up);
            });
        replace(sums, rows, stride, [&](const float* at, int64_t) {
            return mul(decltype(act)::of(load(at)), load(at + kPanelWidth));
        });
    });
}

// The sum is rounded to the type as a product of that type is; the rest is fp32.
void finish_logits(const LinearArgs& a, int64_t rows, float* sums, int64_t stride) {
    with_type(a.weight.type, [&](auto type) {
        replace(sums, rows, stride,
                [&](const float* at, int64_t) { return rounded(type, load(at)); });
    });
    const F32 scale = splat(a.finish.scale), cap = splat(a.finish.softcap);
    replace(sums, rows, stride, [&](const float* at, int64_t) {
        const F32 v = mul(load(at), scale);
        return a.finish.softcap == 0 ? v : mul(cap, tanh(div(v, cap)));
    });
}

template <class E>
void store_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, int64_t count,
                const float* sums, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r, sums += stride) {
        E* y = row_of<E>(a.y, token + r, 0) + lane;
        each(count, [&](auto lanes, int64_t i) { put(lanes, y + i, load(sums + i)); });
    }
}

}  // namespace

void prefetch_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane) {
    const int64_t half = a.weight.out / 2;
    for (int64_t r = token, before = -1; r < token + rows; ++r) {
        const int64_t slot = a.lora.slots[r];
        if (slot < 0 || slot == before) continue;
        before = slot;
        prefetch_lora(a.lora.bank, slot, lane, kPanelWidth);
        if (is_gate(a.finish.kind)) prefetch_lora(a.lora.bank, slot, half + lane, kPanelWidth);
    }
}

void finish_rows(const LinearArgs& a, int64_t token, int64_t rows, int64_t lane, float* sums,
                 int64_t stride) {
    const FinishKind kind = a.finish.kind;
    const int64_t width = is_gate(kind) ? a.weight.out / 2 : a.weight.out;
    const int64_t count = width - lane < kPanelWidth ? width - lane : kPanelWidth;
    add_to(a, token, rows, lane, sums, stride);
    if (kind == FinishKind::logits) {
        finish_logits(a, rows, sums, stride);
        return store_rows<float>(a, token, rows, lane, count, sums, stride);
    }
    if (is_gate(kind)) {
        add_to(a, token, rows, width + lane, sums + kPanelWidth, stride);
        finish_gated(a, rows, sums, stride);
    } else {
        finish_plain(a, rows, sums, stride);
    }
    with_type(a.weight.type, [&](auto type) {
        store_rows<decltype(type)>(a, token, rows, lane, count, sums, stride);
    });
}

}  // namespace quire::QUIRE_LEVEL
