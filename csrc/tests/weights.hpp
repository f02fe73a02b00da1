// Packed weights of the test programs, on buffers that are exactly as long as they must be.
#pragma once

#include <cstring>
#include <memory>

#include "core/pool.hpp"
#include "tests/checks.hpp"

namespace quire {

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Of all panels of a weight.
inline int64_t lanes(int64_t out, bool is_gated) {
    return is_gated ? 2 * round_up(out / 2, kPanelWidth) : round_up(out, kPanelWidth);
}

// Bytes of its own, whose ends are guarded.
struct Bytes {
    explicit Bytes(int64_t count) : count(count), data(new unsigned char[count]()) {}

    // Numbers of either sign around 1.
    Bytes& fill(Type type, uint32_t seed) {
        fill_numbers(data.get(), type, count / size_of(type), seed);
        return *this;
    }
    template <class T>
    T* as() {
        return reinterpret_cast<T*>(data.get());
    }

    int64_t count;
    std::unique_ptr<unsigned char[]> data;
};

// A packed weight with its memory.
struct Weight {
    Weight(Type type, WeightForm form, int64_t in, int64_t out, int64_t group,
           bool is_gated = false)
        : panels(lanes(out, is_gated) * row_bytes(type, form, in, group)),
          scales(form == WeightForm::int8 ? lanes(out, is_gated) * 4 : 0),
          bias((round_up(out, kPanelWidth) + kPanelWidth) * 4),
          packed{type,
                 form,
                 in,
                 out,
                 group,
                 panels.data.get(),
                 scales.as<float>(),
                 bias.fill(Type::f32, 3).as<float>()} {
        packed.is_gated = is_gated;
    }

    static int64_t row_bytes(Type type, WeightForm form, int64_t in, int64_t group) {
        if (form == WeightForm::plain) return round_up(in, 2) * size_of(type);
        if (form == WeightForm::int8) return round_up(in, 4);
        return round_up(in, group) / group * (group / 2 + 2);
    }

    Bytes panels, scales, bias;
    PackedWeight packed;
};

inline void pack(Pool& pool, const Kernels& kernels, Weight& weight) {
    const PackedWeight& w = weight.packed;
    Bytes source(w.in * w.out * size_of(w.type));
    source.fill(w.type, 1);
    Pool::Lease lease(pool);
    uint32_t has_nan = 0;
    const int64_t first = w.out / 3;  // in two parts, as leaves are that become one weight
    for (const Outputs part : {Outputs{0, first}, Outputs{first, w.out - first}}) {
        const Rows rows{source.data.get() + part.first * w.in * size_of(w.type), w.in, 0};
        if (w.form == WeightForm::plain)
            kernels.pack({w, rows, weight.panels.as<void>(), part, &has_nan}, w.out, pool);
        else
            kernels.pack_quantized({w, rows, weight.panels.as<uint8_t>(),
                                    weight.scales.as<float>(), nullptr, part, &has_nan},
                                   w.out, pool);
    }
    require(has_nan == 0, "NaN was seen where there is none");
}

// A weight in codes, with scales of a type, zero points, and its inputs backwards.
struct CodedWeight {
    CodedWeight(Type type, WeightForm form, int64_t in, int64_t out, int64_t group, Type scale_type,
                bool has_zeros, bool is_gated = false)
        : groups(round_up(in, group) / group),
          codes(out * (bits_of(form) == 4 ? (in + 1) / 2 : in)),
          scales(out * groups * size_of(scale_type)),
          zeros(out * groups),
          order(in * 8),
          panels(lanes(out, is_gated) / kPanelWidth *
                 round_up(groups * kPanelWidth *
                              (group * bits_of(form) / 8 + size_of(scale_type) + has_zeros),
                          64)),
          bias((round_up(out, kPanelWidth) + kPanelWidth) * 4),
          packed{type,
                 form,
                 in,
                 out,
                 group,
                 panels.data.get(),
                 nullptr,
                 bias.fill(Type::f32, 3).as<float>(),
                 true,
                 1,
                 scale_type,
                 has_zeros,
                 order.as<int64_t>()} {
        packed.is_gated = is_gated;
        codes.fill(Type::f16, 1);
        scales.fill(scale_type, 2);
        for (int64_t i = 0; i < zeros.count; ++i) zeros.data[i] = i * 7 % 16;
        for (int64_t i = 0; i < in; ++i) order.as<int64_t>()[i] = in - 1 - i;
    }

    int64_t groups;
    Bytes codes, scales, zeros, order, panels, bias;
    PackedWeight packed;
};

inline void pack(Pool& pool, const Kernels& kernels, CodedWeight& weight) {
    Pool::Lease lease(pool);
    kernels.pack_coded({weight.packed, weight.codes.as<uint8_t>(), weight.scales.as<void>(),
                        weight.packed.has_zeros ? weight.zeros.as<uint8_t>() : nullptr,
                        weight.panels.as<uint8_t>()},
                       weight.packed.out, pool);
}

inline int64_t segments_of(const PackedWeight& w) {
    const bool has_groups = w.form != WeightForm::plain && w.form != WeightForm::int8;
    const int64_t unit = has_groups ? w.group : 4;
    return w.in % (4 * unit) == 0 ? 4 : w.in % (2 * unit) == 0 ? 2 : 1;
}

}  // namespace quire
