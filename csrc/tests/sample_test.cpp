// Runs the sampling kernels of every level over odd vocabularies, numbers of every kind, and few
// and many rows, on buffers whose ends AddressSanitizer guards, and checks that a row alone gives
// what it gives among others. Values are checked in Python.

#include <cstring>
#include <string>
#include <vector>

#include "core/pool.hpp"
#include "kernels/tables.hpp"
#include "tests/checks.hpp"

namespace quire {
namespace {

constexpr int64_t kWidths[] = {1, 2, 15, 16, 17, 63, 64, 65, 130, 16384, 16385, 33000};
constexpr int64_t kTokens[] = {0, 1, 3, 11};
constexpr double kSettings[][4] = {
    {0, 0, 1, 0},   {1, 0, 1, 0},      {0.01, 0, 1, 0}, {0.7, 5, 1, 0},       {1, 16385, 1, 0},
    {1, 0, 0.9, 0}, {2, 0, 0.9999, 0}, {1, 0, 1, 0.05}, {0.5, 40, 0.8, 0.01}, {1, 1, 1e-9, 1},
};

enum class Kind { normal, equal, masked, wild };

std::vector<float> logits_of(Kind kind, int64_t count) {
    std::vector<float> values(count);
    uint32_t seed = 7;
    for (float& value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int32_t>(seed)) / 4e8f;
        if (kind == Kind::equal) value = -2;
        if (kind == Kind::masked && seed >> 28 != 0) value = -__builtin_inff();
        if (kind == Kind::wild) std::memcpy(&value, &seed, 4);  // NaN and infinities among them
    }
    return values;
}

template <class T>
bool same(const std::vector<T>& together, int64_t at, const T* alone, int64_t count) {
    return std::memcmp(together.data() + at, alone, count * sizeof(T)) == 0;
}

void check_rows(Pool& pool, const Kernels& kernels, int64_t width, int64_t tokens, Kind kind) {
    Pool::Lease lease(pool);
    const int64_t stride = width + 3, num_top = width < 7 ? width : 7;
    std::vector<float> logits = logits_of(kind, tokens ? (tokens - 1) * stride + width : 0);
    std::vector<double> settings;
    std::vector<int32_t> keys(2 * tokens, 0x1234567), hashes(width), top_ids, ranks(tokens);
    for (int64_t i = 0; i < tokens; ++i)
        settings.insert(settings.end(), kSettings[i % 10], kSettings[i % 10] + 4);
    for (int64_t i = 0; i < width; ++i) hashes[i] = static_cast<int32_t>((i + 1) * 0x9E3779B1u);
    std::vector<int64_t> ids(tokens), largest(tokens), wanted(tokens, width - 1);
    std::vector<float> peaks(tokens), values(tokens), out(tokens * width), sums(tokens), tops;
    top_ids.resize(tokens * num_top), tops.resize(tokens * num_top);
    const auto at = [&](int64_t i) {
        return LogitsRows{logits.data() + i * stride, stride, width};
    };
    const auto run = [&](int64_t first, int64_t count, int64_t* id, float* peak, int64_t* most,
                         float* most_value, float* cut) {
        const double* s = settings.data() + 4 * first;
        const DrawArgs draw{at(first), s, keys.data() + 2 * first, hashes.data(), id, peak};
        require(kernels.draw(draw, count, pool) == Status::ok, "draw");
        require(kernels.greedy({at(first), most, most_value}, count, pool) == Status::ok, "greedy");
        require(kernels.truncate({at(first), s, cut}, count, pool) == Status::ok, "truncate");
    };
    run(0, tokens, ids.data(), peaks.data(), largest.data(), values.data(), out.data());
    for (int64_t i = 0; i < tokens; ++i) {
        int64_t id, most;
        float peak, value;
        std::vector<float> cut(width);
        run(i, 1, &id, &peak, &most, &value, cut.data());
        require(id >= 0 && id < width && most >= 0 && most < width, "an id beyond the vocabulary");
        require(same(ids, i, &id, 1) && same(peaks, i, &peak, 1), "draw: a row alone differs");
        require(same(largest, i, &most, 1) && same(values, i, &value, 1), "greedy: alone differs");
        require(same(out, i * width, cut.data(), width), "truncate: a row alone differs");
    }
    const RankArgs rank{at(0),       wanted.data(), num_top,      top_ids.data(),
                        tops.data(), ranks.data(),  peaks.data(), sums.data()};
    require(kernels.rank(rank, tokens, pool) == Status::ok, "rank");
    for (int32_t id : top_ids) require(id >= 0 && id < width, "a rank beyond the vocabulary");
    for (int64_t wrong : {int64_t{-1}, width}) {
        if (tokens == 0) continue;
        wanted.back() = wrong;
        require(kernels.rank(rank, tokens, pool) == Status::bad_index, "a bad id was taken");
    }
}

}  // namespace
}  // namespace quire

int main() {
    using namespace quire;
    check_levels([](Level level) {
        Pool pool(3);
        for (int64_t width : kWidths)
            for (int64_t tokens : kTokens)
                for (Kind kind : {Kind::normal, Kind::equal, Kind::masked, Kind::wild})
                    check_rows(pool, kernels_for(level), width, tokens, kind);
    });
    return 0;
}
