// Mixtures of experts: the chosen experts of all tokens as two products of groups of rows, one of
// gates and inputs and one of outputs, and the sums of their results.
//
// The pairs of a token and a choice are sorted by expert, so that each expert's weights are read
// once for all of its rows. A row's result does not depend on those of the other rows
// (product.hpp), and each token adds its results in the order of its choice: where pairs lie has no
// influence on a bit.

#include "core/parallel.hpp"
#include "kernels/element.hpp"
#include "kernels/kernels.hpp"
#include "kernels/tiles.hpp"
#include "kernels/vec.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

// Of what lies between the products, for as many tokens as are computed at once; the experts of
// further ones are read again.
constexpr int64_t kBlockBytes = 128 << 20;
constexpr int64_t kFewestTokens = 256;  // of such a block

bool has_adapters(const ExpertsArgs& a, const LoraBank& bank) {
    return a.slots != nullptr && bank.a != nullptr;
}

// What adapters of some bank have of each pair.
struct PairFactors {
    float* factors;
    int32_t* used;
};

// Memory of a block's pairs of a token and a choice, whose places are those of the sorted order.
struct Pairs {
    int64_t tokens, count;
    int64_t num_bytes = 0;
    int64_t num_groups = 0;
    RowGroup* groups;  // of each expert that was chosen
    int64_t* next;     // [experts], while they are sorted
    int32_t* sources;  // [place]: the token
    int32_t* places;   // [token][choice]
    char* rows;        // [place][in], where the tokens' rows are not multiplied as they are
    char* hidden;
    char* results;
    int32_t* slots;  // [place]
    PairFactors up_factors, down_factors;

    Pairs(const ExpertsArgs& a, int64_t num_tokens, char* memory)
        : tokens(num_tokens), count(num_tokens * a.top_k), memory_(memory) {
        const int64_t bytes = size_of(a.up->type);
        take(groups, a.experts < count ? a.experts : count);
        take(next, a.experts);
        take(sources, count);
        take(places, count);
        take(rows, copies_rows(a) ? count * a.up->in * bytes : 0);
        take(hidden, count * a.down->in * bytes);
        take(results, count * a.down->out * bytes);
        take(slots, a.slots == nullptr ? 0 : count);
        take(up_factors, a, a.up_bank);
        take(down_factors, a, a.down_bank);
    }

    static bool copies_rows(const ExpertsArgs& a) {
        return a.weighs_input || has_adapters(a, a.up_bank);
    }

   private:
    // Without memory, only its size is found.
    template <class T>
    void take(T*& part, int64_t size) {
        part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + num_bytes);
        num_bytes += (size * sizeof(T) + 63) / 64 * 64;
    }
    void take(PairFactors& part, const ExpertsArgs& a, const LoraBank& bank) {
        const int64_t size = has_adapters(a, bank) ? count : 0;
        take(part.factors, size * bank.parts * bank.max_rank);
        take(part.used, size);
    }

    char* memory_;
};

// Sort the pairs of a block's tokens, from `first` on, by expert; those of one stay in order.
void sort_pairs(const ExpertsArgs& a, int64_t first, Pairs& pairs) {
    const int32_t* chosen = a.chosen + first * a.top_k;
    for (int64_t e = 0; e < a.experts; ++e) pairs.next[e] = 0;
    for (int64_t i = 0; i < pairs.count; ++i) ++pairs.next[chosen[i]];
    int64_t before = 0;
    for (int64_t e = 0; e < a.experts; ++e) {
        const int64_t rows = pairs.next[e];
        if (rows > 0) pairs.groups[pairs.num_groups++] = {e, before, rows};
        pairs.next[e] = before;
        before += rows;
    }
    for (int64_t t = 0, i = 0; t < pairs.tokens; ++t)
        for (int64_t j = 0; j < a.top_k; ++j, ++i) {
            const int64_t expert = chosen[i], place = pairs.next[expert]++;
            pairs.places[i] = static_cast<int32_t>(place);
            pairs.sources[place] = static_cast<int32_t>(first + t);
            if (a.slots == nullptr) continue;
            const int64_t slot = a.slots[first + t];
            pairs.slots[place] = slot < 0 ? -1 : static_cast<int32_t>(slot * a.experts + expert);
        }
}

// The rows of a block's pairs, times the weights of their choices if a.weighs_input.
template <class E>
void copy_rows(const ExpertsArgs& a, int64_t first, const Pairs& pairs, Pool& pool) {
    const int64_t width = a.up->in;
    parallel_rows(pool, pairs.count, width, [&](int64_t i, int64_t stop) {
        for (; i < stop; ++i) {
            const int64_t token = first + i / a.top_k;
            const E* from = row_of<E>(a.x, token, 0);
            E* to = reinterpret_cast<E*>(pairs.rows) + pairs.places[i] * width;
            if (!a.weighs_input) {
                __builtin_memcpy(to, from, width * sizeof(E));
                continue;
            }
            const F32 weight = rounded(E{}, splat(a.weights[first * a.top_k + i]));
            each(width, [&](auto lanes, int64_t k) {
                put(lanes, to + k, mul(get(lanes, from + k), weight));
            });
        }
    });
}

// y of a block's tokens.
template <class E>
void add_results(const ExpertsArgs& a, int64_t first, const Pairs& pairs, Pool& pool) {
    const int64_t width = a.down->out;
    const E* results = reinterpret_cast<const E*>(pairs.results);
    parallel_rows(pool, pairs.tokens, width * a.top_k, [&](int64_t t, int64_t stop) {
        for (; t < stop; ++t) {
            const int32_t* places = pairs.places + t * a.top_k;
            const float* weights = a.weights + (first + t) * a.top_k;
            E* y = row_of<E>(a.y, first + t, 0);
            each(width, [&](auto lanes, int64_t k) {
                const auto weighed = [&](int64_t j) {
                    const F32 result = get(lanes, results + places[j] * width + k);
                    return a.weighs_input ? result : mul(result, splat(weights[j]));
                };
                F32 sum = weighed(0);
                for (int64_t j = 1; j < a.top_k; ++j) sum = add(sum, weighed(j));
                put(lanes, y + k, sum);
            });
        }
    });
}

// y = finish(x @ weight of each group), and what adapters add; sources: see GroupedArgs.
void multiply(const ExpertsArgs& a, const Pairs& pairs, const PackedWeight* weights,
              const ProductKernels& kernels, const Finish& finish, const LoraBank& bank,
              const PairFactors& factors, const Rows& x, const int32_t* sources, const Rows& y,
              Pool& pool) {
    GroupedArgs args{{*weights, x, y, finish}, weights, pairs.groups, pairs.num_groups, sources};
    args.product.weight.is_streamed = a.is_streamed;
    if (has_adapters(a, bank)) {
        a.shrink({bank, weights->type, x, pairs.slots, factors.factors, factors.used, false},
                 pairs.count, pool);
        args.product.lora = {bank, factors.factors, factors.used};
    }
    kernels.grouped(args, pairs.count, pool);
}

void compute_block(const ExpertsArgs& a, int64_t first, int64_t tokens, Pool& pool) {
    const int64_t bytes = Pairs(a, tokens, nullptr).num_bytes;
    Pairs pairs(a, tokens, static_cast<char*>(outer_scratch(pool, bytes)));
    sort_pairs(a, first, pairs);
    const bool copies = Pairs::copies_rows(a);
    if (copies)
        with_type(a.up->type, [&](auto type) { copy_rows<decltype(type)>(a, first, pairs, pool); });
    const Rows rows{pairs.rows, a.up->in, 0}, hidden{pairs.hidden, a.down->in, 0};
    multiply(a, pairs, a.up, a.up_product, a.finish, a.up_bank, pairs.up_factors,
             copies ? rows : a.x, copies ? nullptr : pairs.sources, hidden, pool);
    multiply(a, pairs, a.down, a.down_product, {FinishKind::plain, Act::none, 1, 0}, a.down_bank,
             pairs.down_factors, hidden, nullptr, {pairs.results, a.down->out, 0}, pool);
    with_type(a.up->type, [&](auto type) { add_results<decltype(type)>(a, first, pairs, pool); });
}

Status experts(const ExpertsArgs& a, int64_t tokens, Pool& pool) {
    for (int64_t i = 0; i < tokens * a.top_k; ++i)
        if (a.chosen[i] < 0 || a.chosen[i] >= a.experts) return Status::bad_index;
    const int64_t fitting = kBlockBytes / Pairs(a, 1, nullptr).num_bytes;
    const int64_t most = fitting > kFewestTokens ? fitting : kFewestTokens;
    for (int64_t first = 0; first < tokens; first += most)
        compute_block(a, first, tokens - first < most ? tokens - first : most, pool);
    return Status::ok;
}

}  // namespace

void fill_experts(Kernels& table) { table.experts = experts; }

}  // namespace quire::QUIRE_LEVEL
