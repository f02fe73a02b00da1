// Sampling: the largest entry of rows of logits, draws, filters, and the figures of logprobs.
//
// A row is measured, which reads it from memory once, and then stays in a cache for the rest. With
// many rows each is one tile; few rows are cut into segments of the vocabulary, whose results are
// merged in order. Both ways give the same bits: everything but maxima is computed per entry or in
// an order that depends on the width alone.

#include "kernels/kernels.hpp"
#include "kernels/sample_race.hpp"

namespace quire::QUIRE_LEVEL {
namespace {

constexpr int64_t kFewRows = 8;
constexpr int64_t kBlocksPerSegment = 256;

VocabRow row_at(const LogitsRows& logits, int64_t row, float* maxima) {
    return {logits.data + row * logits.stride, logits.width, maxima, 0, false};
}

// Bytes of `count` elements of a type, rounded up to a line.
template <class T>
int64_t lines(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
}

void measure(VocabRow& row) {
    row.has_nan = measure_blocks(row, 0, num_blocks(row.width));
    find_peak(row);
}

// visit(row, index, room) for every row, measured; `room` bytes of scratch memory for each.
template <class Visit>
void each_measured(const LogitsRows& logits, int64_t tokens, int64_t room, Pool& pool,
                   const Visit& visit) {
    const int64_t maxima_bytes = lines<float>(num_blocks(logits.width));
    parallel(pool, tokens, [&](int64_t index, int worker) {
        char* memory = static_cast<char*>(scratch(pool, worker, maxima_bytes + room));
        VocabRow row = row_at(logits, index, reinterpret_cast<float*>(memory));
        measure(row);
        visit(row, index, memory + maxima_bytes);
    });
}

// Few rows, cut into segments, in memory of the whole operation.
struct Segments {
    int64_t per_row;
    int64_t blocks;
    int64_t tokens;
    VocabRow* rows;
    bool* has_nan;  // of each segment
    Winner* winners;
    Kept* kept;

    Segments(const LogitsRows& logits, int64_t count, Pool& pool)
        : blocks(num_blocks(logits.width)), tokens(count) {
        per_row = (blocks + kBlocksPerSegment - 1) / kBlocksPerSegment;
        const int64_t parts = per_row * tokens, per_maxima = lines<float>(blocks);
        char* memory = static_cast<char*>(
            shared_scratch(pool, lines<VocabRow>(tokens) + lines<bool>(parts) + lines<Kept>(tokens) +
                                     lines<Winner>(parts) + per_maxima * tokens));
        rows = reinterpret_cast<VocabRow*>(memory);
        memory += lines<VocabRow>(tokens);
        has_nan = reinterpret_cast<bool*>(memory);
        memory += lines<bool>(parts);
        winners = reinterpret_cast<Winner*>(memory);
        memory += lines<Winner>(parts);
        kept = reinterpret_cast<Kept*>(memory);
        memory += lines<Kept>(tokens);
        for (int64_t i = 0; i < tokens; ++i)
            rows[i] = row_at(logits, i, reinterpret_cast<float*>(memory + i * per_maxima));
    }

    // body(row index, segment, first block, last block)
    template <class Body>
    void each(Pool& pool, const Body& body) const {
        parallel(pool, per_row * tokens, [&](int64_t part, int) {
            const int64_t first = part % per_row * kBlocksPerSegment;
            const int64_t stop = first + kBlocksPerSegment;
            body(part / per_row, part, first, stop < blocks ? stop : blocks);
        });
    }

    void measure(Pool& pool) {
        each(pool, [&](int64_t row, int64_t part, int64_t first, int64_t stop) {
            has_nan[part] = measure_blocks(rows[row], first, stop);
        });
        for (int64_t row = 0; row < tokens; ++row) {
            for (int64_t part = row * per_row; part < (row + 1) * per_row; ++part)
                rows[row].has_nan |= has_nan[part];
            find_peak(rows[row]);
        }
    }
};

bool is_finite(float x) { return x - x == 0; }

// The id of the peak, 0 where it is not finite.
int64_t largest_id(const VocabRow& row) { return is_finite(row.peak) ? first_of_peak(row) : 0; }

Status greedy(const GreedyArgs& a, int64_t tokens, Pool& pool) {
    const auto answer = [&](const VocabRow& row, int64_t i) {
        a.ids[i] = largest_id(row);
        a.values[i] = row.peak;
    };
    if (tokens >= kFewRows) {
        each_measured(a.logits, tokens, 0, pool,
                      [&](const VocabRow& row, int64_t i, void*) { answer(row, i); });
        return Status::ok;
    }
    Segments segments(a.logits, tokens, pool);
    segments.measure(pool);
    for (int64_t i = 0; i < tokens; ++i) answer(segments.rows[i], i);
    return Status::ok;
}

Settings settings_of(const double* settings, int64_t i) {
    const double* s = settings + 4 * i;
    return {s[0], s[1], s[2], s[3]};
}

Race race_of(const DrawArgs& a, int64_t i, const VocabRow& row, const Kept& kept) {
    const float temperature = static_cast<float>(settings_of(a.settings, i).temperature);
    const auto* key = reinterpret_cast<const uint32_t*>(a.keys) + 2 * i;
    return {row, a.hashes, key[0], key[1], temperature, row.peak / temperature, kept};
}

// Answers without a race: the largest is asked for, or there is no finite one.
bool is_settled(const DrawArgs& a, int64_t i, const VocabRow& row) {
    const float temperature = static_cast<float>(a.settings[4 * i]);
    a.peaks[i] = temperature == 0 ? row.peak : row.peak / temperature;
    a.ids[i] = temperature == 0 ? largest_id(row) : 0;
    return temperature == 0 || !is_finite(a.peaks[i]);
}

void draw_apart(const DrawArgs& a, Segments& segments, Pool& pool) {
    const int64_t width = a.logits.width;
    segments.measure(pool);
    bool settled[kFewRows];
    parallel(pool, segments.tokens, [&](int64_t i, int worker) {
        settled[i] = is_settled(a, i, segments.rows[i]);
        if (settled[i]) return;
        void* memory = scratch(pool, worker, room_bytes(width));
        segments.kept[i] =
            survivors(segments.rows[i], settings_of(a.settings, i), room_at(memory, width));
    });
    segments.each(pool, [&](int64_t i, int64_t part, int64_t first, int64_t stop) {
        if (!settled[i])
            segments.winners[part] =
                race_blocks(race_of(a, i, segments.rows[i], segments.kept[i]), first, stop);
    });
    for (int64_t i = 0; i < segments.tokens; ++i) {
        Winner best = kNobody;
        for (int64_t part = i * segments.per_row; part < (i + 1) * segments.per_row; ++part)
            if (!settled[i] && segments.winners[part].score > best.score)
                best = segments.winners[part];
        if (!settled[i]) a.ids[i] = best.id;
    }
}

Status draw(const DrawArgs& a, int64_t tokens, Pool& pool) {
    if (tokens < kFewRows) {
        Segments segments(a.logits, tokens, pool);
        draw_apart(a, segments, pool);
        return Status::ok;
    }
    const int64_t width = a.logits.width;
    each_measured(a.logits, tokens, room_bytes(width), pool,
                  [&](const VocabRow& row, int64_t i, void* memory) {
                      if (is_settled(a, i, row)) return;
                      const Kept kept =
                          survivors(row, settings_of(a.settings, i), room_at(memory, width));
                      a.ids[i] = race_blocks(race_of(a, i, row, kept), 0, num_blocks(width)).id;
                  });
    return Status::ok;
}

void truncate_row(const VocabRow& row, const Settings& s, const Room& room, float* out) {
    const float temperature = static_cast<float>(s.temperature);
    const bool is_filtered = temperature != 0 && is_finite(row.peak / temperature);
    const Kept kept = is_filtered ? survivors(row, s, room) : Kept{-kInfinity, row.width};
    for (int64_t i = 0; i < row.width; ++i) {
        const float x = temperature == 0 ? row.values[i] : row.values[i] / temperature;
        out[i] = !is_filtered || is_kept(kept, x, i) ? x : -kInfinity;
    }
}

Status truncate(const TruncateArgs& a, int64_t tokens, Pool& pool) {
    const int64_t width = a.logits.width;
    each_measured(a.logits, tokens, room_bytes(width), pool,
                  [&](const VocabRow& row, int64_t i, void* memory) {
                      truncate_row(row, settings_of(a.settings, i), room_at(memory, width),
                                   a.out + i * width);
                  });
    return Status::ok;
}

// log(sum of e^(entry - peak)); the sums of four vectors go on in fp64.
float log_sum(const VocabRow& row) {
    F64 sum = zero64();
    const F32 peak = splat(row.peak);
    for (int64_t i = 0; i < row.width; i += 4 * kLanes) {
        F32 part = splat(0);
        for (int64_t j = i; j < i + 4 * kLanes; j += kLanes)
            part = add(part, exp(sub(entries(row, j), peak)));
        accumulate(sum, part);
    }
    return static_cast<float>(__builtin_log(total(sum)));
}

void rank_row(const RankArgs& a, const VocabRow& row, int64_t i, const Keys& keys) {
    a.peaks[i] = row.peak;
    a.log_sums[i] = is_finite(row.peak) ? log_sum(row) : __builtin_nanf("");
    a.ranks[i] = static_cast<int32_t>(count_at_least(row, row.values[a.token_ids[i]]));
    if (a.num_top == 0) return;
    int32_t* ids = a.top_ids + i * a.num_top;
    float* values = a.top_values + i * a.num_top;
    const int64_t found = row.has_nan ? 0 : collect_largest(row, a.num_top, keys);
    for (int64_t n = 0; n < a.num_top; ++n) {
        ids[n] = static_cast<int32_t>(n < found ? id_of(keys.data[n]) : n);
        values[n] = row.values[ids[n]];
    }
}

Status rank(const RankArgs& a, int64_t tokens, Pool& pool) {
    const int64_t width = a.logits.width;
    for (int64_t i = 0; i < tokens; ++i)
        if (a.token_ids[i] < 0 || a.token_ids[i] >= width) return Status::bad_index;
    each_measured(a.logits, tokens, room_bytes(width), pool,
                  [&](const VocabRow& row, int64_t i, void* memory) {
                      rank_row(a, row, i, room_at(memory, width).keys);
                  });
    return Status::ok;
}

}  // namespace

void fill_sample(Kernels& kernels) {
    kernels.greedy = &greedy;
    kernels.draw = &draw;
    kernels.truncate = &truncate;
    kernels.rank = &rank;
}

}  // namespace quire::QUIRE_LEVEL
