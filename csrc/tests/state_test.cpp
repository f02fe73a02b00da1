// Runs the kernels of layers with a recurrent state at every level that this machine can run over
// odd sizes, on buffers whose ends AddressSanitizer guards, and checks that a row's tokens one
// after the other give the bits of all at once. Values are checked by the conformance tests in
// Python.

#include <cstring>
#include <string>
#include <vector>

#include "core/pool.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"

namespace quire {
namespace {

constexpr int64_t kWidths[] = {1, 15, 16, 17, 64, 129, 300};
constexpr int64_t kTokens = 5, kBlocks = 9;

// Rows of 3 and 2 tokens; block 0 is read by neither, 5 and 6 hold what is between tokens.
constexpr int64_t kReads[kTokens] = {1, -1, -1, 2, -1};
constexpr int64_t kWrites[kTokens] = {-1, 3, 4, -1, 7};

struct Memory {
    Memory(int64_t count, int64_t size, uint32_t seed) : bytes(count * size), size(size) {
        for (int64_t i = 0; i < count; ++i) {
            seed = seed * 1664525u + 1013904223u;
            const float value = static_cast<float>(static_cast<int32_t>(seed)) / 2e9f;
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            const auto half = static_cast<uint16_t>((seed >> 16 & 0x83ff) | 0x3000);
            if (size == 4)
                std::memcpy(&bytes[i * 4], &bits, 4);
            else
                std::memcpy(&bytes[i * 2], &half, 2);
        }
    }
    const float* floats() { return reinterpret_cast<const float*>(bytes.data()); }
    std::vector<unsigned char> bytes;
    int64_t size;
};

// What one kernel is run on: its rows, each [tokens, width], and its states.
struct Scene {
    Type type;
    std::vector<Memory> rows;
    std::vector<int64_t> widths;
    Memory states;
    Memory first_states;

    Scene(Type type, std::vector<int64_t> widths, int64_t state, int64_t state_size)
        : type(type),
          widths(std::move(widths)),
          states(kBlocks * state, state_size, 77),
          first_states(states) {
        for (int64_t width : this->widths)
            rows.emplace_back(kTokens * width, size_of(type), static_cast<uint32_t>(width));
    }
    Rows at(size_t i, int64_t token) {
        return {rows[i].bytes.data() + token * widths[i] * size_of(type), widths[i], 0};
    }
};

// `make(token, states)`: the arguments from a token on. The last rows of the scene are the output.
template <class Args, class Make>
void check(Pool& pool, Kernel<Args> kernel, Scene& scene, const Make& make,
           const std::string& what) {
    Pool::Lease lease(pool);
    const int64_t block = static_cast<int64_t>(scene.states.bytes.size()) / kBlocks;
    char* data = reinterpret_cast<char*>(scene.states.bytes.data());
    const States all{data, block, kBlocks, kReads, kWrites};
    require(kernel(make(0, all), kTokens, pool) == Status::ok, what);
    const auto outputs = scene.rows.back().bytes;
    const auto states = scene.states.bytes;
    scene.states.bytes = scene.first_states.bytes;
    data = reinterpret_cast<char*>(scene.states.bytes.data());
    int64_t now = -1;
    for (int64_t t = 0; t < kTokens; ++t) {
        const int64_t read = kReads[t] >= 0 ? kReads[t] : now;
        now = kWrites[t] >= 0 ? kWrites[t] : 5 + t % 2;
        const States one{data, block, kBlocks, &read, &now};
        require(kernel(make(t, one), 1, pool) == Status::ok, what);
    }
    require(outputs == scene.rows.back().bytes, what + ": other outputs token by token");
    for (int64_t kept : kWrites)
        if (kept >= 0)
            require(std::memcmp(&states[kept * block], data + kept * block, block) == 0,
                    what + ": other states token by token");
    const int64_t far = kBlocks, nowhere = -1;
    require(kernel(make(0, {data, block, kBlocks, &far, &nowhere}), 1, pool) == Status::bad_index,
            what + ": a block that is not there");
    require(
        kernel(make(0, {data, block, kBlocks, &nowhere, &nowhere}), 1, pool) == Status::bad_index,
        what + ": a step that begins without a row");
}

void check_conv(Pool& pool, const Kernels& kernels, Type type, int64_t width) {
    for (int64_t kernel : {2, 3, 4}) {
        Scene s(type, {width, width, width, width}, (kernel - 1) * width, size_of(type));
        Memory weight(kernel * width, size_of(type), 5), bias(width, size_of(type), 6);
        check(
            pool, kernels.short_conv, s,
            [&](int64_t t, const States& states) {
                return ShortConvArgs{
                    type,       width,      kernel,     Act::silu,           s.at(0, t),
                    s.at(1, t), s.at(2, t), s.at(3, t), weight.bytes.data(), bias.bytes.data(),
                    states};
            },
            "short_conv");
    }
}

void check_mamba(Pool& pool, const Kernels& kernels, Type type, int64_t width) {
    const int64_t size = 3;
    Scene s(type, {width, width, size, size, width, width}, size * width, 4);
    Memory decay(size * width, 4, 7), skip(width, 4, 8);
    check(
        pool, kernels.mamba_scan, s,
        [&](int64_t t, const States& states) {
            return MambaScanArgs{type,       width,          size,          s.at(0, t),
                                 s.at(1, t), s.at(2, t),     s.at(3, t),    s.at(4, t),
                                 s.at(5, t), decay.floats(), skip.floats(), states};
        },
        "mamba_scan");
}

void check_mamba2(Pool& pool, const Kernels& kernels, Type type, int64_t dim) {
    const int64_t heads = 4, groups = 2, size = 5;
    Scene s(type, {heads * dim, heads, groups * size, groups * size, heads * dim},
            heads * size * dim, 4);
    Memory decay(heads, 4, 9), skip(heads, 4, 10), bias(heads, 4, 11);
    check(
        pool, kernels.mamba2_scan, s,
        [&](int64_t t, const States& states) {
            return Mamba2ScanArgs{
                type,          heads,      dim,        size,       groups,         s.at(0, t),
                s.at(1, t),    s.at(2, t), s.at(3, t), s.at(4, t), decay.floats(), skip.floats(),
                bias.floats(), 0.1f,       2.0f,       states};
        },
        "mamba2_scan");
}

void check_delta(Pool& pool, const Kernels& kernels, Type type, int64_t dim) {
    const int64_t heads = 4, key_heads = 2, size = 33;  // the widest is cut
    Scene s(type, {key_heads * size, key_heads * size, heads * dim, heads, heads, heads * dim},
            heads * size * dim, 4);
    Memory decay(heads, 4, 12), bias(heads, 4, 13);
    check(
        pool, kernels.gated_delta, s,
        [&](int64_t t, const States& states) {
            return GatedDeltaArgs{type,       heads,      key_heads,      dim,           size,
                                  s.at(0, t), s.at(1, t), s.at(2, t),     s.at(3, t),    s.at(4, t),
                                  s.at(5, t), 1e-6f,      decay.floats(), bias.floats(), states};
        },
        "gated_delta");
}

void check_norm(Pool& pool, const Kernels& kernels, Type type, int64_t group) {
    const int64_t width = 3 * group;
    Scene s(type, {width, width, width}, 1, 4);
    Memory weight(width, size_of(type), 14);
    for (bool is_shared : {false, true})
        for (bool gate_first : {false, true}) {
            Pool::Lease lease(pool);
            const GatedNormArgs args{type,       width,      group,      gate_first,
                                     s.at(0, 0), s.at(1, 0), s.at(2, 0), weight.bytes.data(),
                                     is_shared,  1e-5f};
            require(kernels.gated_norm(args, kTokens, pool) == Status::ok, "gated_norm");
        }
}

void check_level(Level level) {
    const Kernels kernels = kernels_for(level);
    for (int threads : {1, 3}) {
        Pool pool(threads);
        for (Type type : kTypes)
            for (int64_t width : kWidths) {
                check_conv(pool, kernels, type, width);
                check_mamba(pool, kernels, type, width);
                check_mamba2(pool, kernels, type, width);
                check_delta(pool, kernels, type, width);
                check_norm(pool, kernels, type, width);
            }
    }
}

}  // namespace
}  // namespace quire

int main() {
    using namespace quire;
    check_levels(check_level);
    return 0;
}
