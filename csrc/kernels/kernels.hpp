// The native operations: their arguments, and the table of one level's functions.
//
// A kernel is a plain function over a struct of pointers, strides and sizes. The number of tokens T
// is not part of the struct but a parameter of its own, so that a recorded call can be replayed for
// any T that its buffers hold. Strides and sizes count elements. Everything a kernel writes, it
// computes in an order that depends on the struct alone, never on T or on the thread (row by row).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/parallel.hpp"

namespace quire {

enum class Type : int32_t { f32, bf16, f16 };
constexpr int kNumTypes = 3;
constexpr int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }  // in bytes

enum class Status : int32_t {
    ok,
    bad_index,    // an id lies outside of its table; some rows may have been written
    interrupted,  // a Python entry raised; the error is pending
    aborted       // another rank will not come to a collective; abort_reason() says why
};

template <class Args>
using Kernel = Status (*)(const Args&, int64_t tokens, Pool&);

// Rows of activations: row r of token t begins at data + t * token_stride + r * row_stride.
struct Rows {
    void* data;
    int64_t token_stride;
    int64_t row_stride;
};

enum class NormKind : int32_t { rms, rms_late_cast, rms1p, layer, layer1p, none };

// weight and bias may be null; row r of a token uses the parameters at r * param_stride.
struct NormParams {
    NormKind kind;
    float eps;
    const void* weight;
    const void* bias;
    int64_t param_stride;
};

// out = norm(x) over `width` elements.
struct NormArgs {
    Type type;
    int64_t rows_per_token;
    int64_t width;
    Rows x;
    Rows out;
    NormParams norm;
};

// sum = x + scale * delta, one row per token.
struct AddArgs {
    Type type;
    int64_t width;
    float scale;
    Rows x;
    Rows delta;
    Rows sum;
};

// sum = x + scale * delta, out = norm(sum), one row per token.
struct AddNormArgs {
    AddArgs add;
    Rows out;
    NormParams norm;
};

// Outputs first..first+count-1 of a weight: those of one of the tensors that it is made from.
struct Outputs {
    int64_t first, count;
};

// Outputs of a weight whose values are [outputs.count, in] at `source`.
struct SourceRows {
    Outputs outputs;
    const void* source;
};

// The values of a weight that a thread packs while products with it are computed already. A
// product that finds is_packed unset takes them from the rows, and counts among `readers` meanwhile:
// they are there as long as one does, or as is_packed is unset. reads: all there were.
struct UnpackedRows {
    const SourceRows* parts;
    int64_t num_parts;
    mutable uint32_t is_packed;
    mutable uint32_t readers;
    mutable uint32_t reads;
};

// out = table[ids] * scale (+ position_table[positions]); position_table may be null. The table's
// rows are table_stride apart, or with in_panels they are the outputs of a packed weight; rows: where
// they are, in one part, until it is packed, or null.
struct EmbedArgs {
    Type type;
    int64_t width;
    float scale;
    const int64_t* ids;
    const void* table;
    int64_t table_rows;
    int64_t table_stride;
    bool in_panels;
    const UnpackedRows* rows;
    const int64_t* positions;
    const void* position_table;
    int64_t position_rows;
    int64_t position_stride;
    Rows out;
};

// out = y * sigmoid(gate); gate_width is the width, or 1 for one gate per token.
struct ScaleGateArgs {
    Type type;
    int64_t width;
    int64_t gate_width;
    Rows y;
    Rows gate;
    Rows out;
};

// spans, rest [R, width]: += the tokens of R chunks; see ops/mixers/pooling.py. chunks [R, 3]:
// first row of x [tokens, width], position of the first token, number of tokens.
struct SumChunksArgs {
    Type type;
    int64_t width;
    int64_t span;
    Rows x;
    int64_t tokens;
    const int64_t* chunks;
    float* spans;
    float* rest;
};

enum class Act : int32_t { none, silu, gelu, gelu_tanh, relu, relu2 };

enum class FinishKind : int32_t { plain, gated, limited, logits, partial, bounded };

// What becomes of the sums of a product. plain: y = act(sum + bias). gated: the first half of the
// outputs is the gate of the second, y = act(gate) * up. limited: the same with gpt-oss's gate, cut
// at `scale`, and bounded: with act(gate) at most `scale` and up within it (ops/activation.py).
// logits, always fp32: softcap * tanh(scale * sum / softcap), the
// sum rounded to the type first, without a cap where it is 0. partial: the sum of the
// segments as it is, for another operation to add to others; nothing else becomes of it.
struct Finish {
    FinishKind kind;
    Act act;
    float scale;
    float softcap;
};

// Outputs that are computed together; weights are stored in panels of as many.
constexpr int64_t kPanelWidth = 32;

enum class WeightForm : int32_t { plain, int8, int4, codes4, codes8, floats8, table4 };

// Of a weight in codes, each code.
constexpr int bits_of(WeightForm form) {
    return form == WeightForm::codes4 || form == WeightForm::table4 ? 4 : 8;
}

// How rows of activations are rounded before a product with codes: to numbers of e4m3 or whole
// numbers up to 127, times a scale. That is `scale`, or if it is 0 what maps the largest magnitude
// of each `group` inputs, or with a group of 0 of the row, to the largest number.
enum class RowType : int32_t { kept, floats, integers };
struct RowRounding {
    RowType to = RowType::kept;
    int64_t group = 0;
    float scale = 0;
};

// A weight [out, in] in panels: of the activations' type (linear_pack.cpp), or of small integers
// (quantized.cpp), int4 with a scale for every `group` inputs, a multiple of 4. bias, and the
// scales of int8, are fp32 and as long as out rounded up to panels, the bias one panel more; or
// null. is_weight_only: rows of activations keep their values, else they become int8 for the
// product.
//
// Or of codes (coded.cpp), with a scale of scale_type, and with has_zeros a zero point, for every
// `group` inputs: 8, 16, 32, 64 or 128; those of floats8 are numbers of e4m3, those of table4 stand
// for the 16 numbers of `table`. order: input i of the weight is x[order[i]]; or null. rounding:
// without an order.
//
// is_streamed: it is read from memory in every step, being one of more weights than caches hold,
// and read best as one stream for each thread.
//
// is_gated: its first half of outputs are gates of the second, and products finish both together.
// Panels of the halves take turns, so that those read together lie side by side; each half is
// filled up to whole panels.
//
// The inputs form 1, 2 or 4 segments of equal length (several: a multiple of 4 and of `group`),
// each summed by itself; then neighbours are added, ((0 + 1) + (2 + 3)). A process that has some of
// the inputs of a weight, whole segments of it, can thus bring a part of the sum without changing a
// bit.
//
// rows: where its values are until its panels have them; or null.
struct PackedWeight {
    Type type;
    WeightForm form;
    int64_t in;
    int64_t out;
    int64_t group;
    const void* panels;
    const float* scales;
    const float* bias;
    bool is_weight_only = false;
    int64_t segments = 1;
    Type scale_type = Type::f32;
    bool has_zeros = false;
    const int64_t* order = nullptr;
    RowRounding rounding = {};
    float table[16] = {};
    bool is_streamed = false;
    bool is_gated = false;
    const UnpackedRows* rows = nullptr;
};

// What is added to some rows of a product's sums, fp32: to row t, row rows[t] of values; nothing
// where that is negative. `values` may be null.
struct Addend {
    const float* values;
    int64_t stride;
    const int32_t* rows;
};

// Outputs [start, start + size) of a product, to which part `part` of an adapter adds. Their rows
// of B begin with block `block` of a slot.
struct LoraPiece {
    int64_t start;
    int64_t size;
    int64_t part;
    int64_t block;
};

// Outputs in a block of B.
constexpr int64_t kLoraBlock = 16;

// The low-rank adapters of a product, by slot: what slot s adds is b @ (a @ x), a part at a time.
// Part p has rank ranks[s * parts + p], at most max_rank. Its rows of A, `in` inputs each, begin
// with row (s * parts + p) * max_rank. B is cut into blocks of 16 outputs, in which the 16 values
// of one rank follow those of another; a slot has room for max_rank in each of its `blocks`, and
// the blocks of a piece follow one another without gaps. The inputs form segments as those of a
// weight do. Instead, the A of a table has for each id max_rank values, of which the first `rank`
// count.
struct LoraBank {
    Type type = Type::f32;
    int64_t in = 0;
    int64_t segments = 1;
    int64_t parts = 0;
    int64_t max_rank = 0;
    int64_t blocks = 0;
    const void* a = nullptr;
    const void* b = nullptr;
    const int32_t* ranks = nullptr;
    const LoraPiece* pieces = nullptr;
    int64_t num_pieces = 0;
};

// What adapters add to some rows of a product's sums: row t has that of slot slots[t], nothing
// where that is negative. factors [T, parts * max_rank] are a @ x; they may be null.
struct LoraAddend {
    LoraBank bank;
    const float* factors = nullptr;
    const int32_t* slots = nullptr;
};

// y = finish(x @ weight + bias + addend); x and y are of the weight's type (logits are fp32).
// A partial product has sums [tokens][out] instead, of int32 where rows and weights are
// int8, else fp32, without the scales of rounded rows. peaks: the largest magnitude in each row of
// x where that holds only some of the inputs, else null.
struct LinearArgs {
    PackedWeight weight;
    Rows x;
    Rows y;
    Finish finish;
    Addend addend = {};
    const float* peaks = nullptr;
    LoraAddend lora = {};
};

// y = what partial sums [T, count, width] make: added up, neighbours first where they are a power
// of two and else one after the other, times the scales of outputs and of rows with
// these peaks, plus bias and addend, rounded once. With are_whole the sums are int32, else fp32.
// scales, peaks and bias may be null.
struct LinearTotalArgs {
    Type type;
    int64_t width;
    int64_t count;
    bool are_whole;
    const void* parts;
    const float* scales;
    const float* peaks;
    const float* bias;
    Addend addend;
    void* y;
};

// factors = a @ x for the rows with an adapter: [T, parts * max_rank], or with is_partial for each
// segment of the inputs, [T, segments, parts * max_rank]; what is beyond a rank stays as it is.
// used [T]: the slots of those rows whose adapters add to the product, -1 for the others.
struct LoraShrinkArgs {
    LoraBank bank;
    Type type;  // of x
    Rows x;
    const int32_t* slots;
    float* factors;
    int32_t* used;
    bool is_partial;
};

// values [T, width]: what adapters add to the rows that have one, zeros for the others.
struct LoraExpandArgs {
    LoraAddend lora;
    int64_t width;
    float* values;
};

// out = x + scale * what the adapters of the rows add to an embedding of ids.
struct LoraEmbedArgs {
    LoraBank bank;
    Type type;
    int64_t width;
    float scale;
    Rows x;
    const int64_t* ids;
    const int32_t* slots;
    Rows out;
};

// y[h] = x[h] @ weight of head h, where x and y have a row per head. `first` is the product of head
// 0, with a plain weight and plain finish; the panels of the next head begin `weight_bytes` later.
struct HeadsArgs {
    LinearArgs first;
    int64_t heads;
    int64_t weight_bytes;
};

// Rows [first, first + rows) of a step, that are multiplied with one weight of several.
struct RowGroup {
    int64_t weight;
    int64_t first;
    int64_t rows;
};

// Products of the rows of some groups, each with a weight of its own: they are `product` but for
// the weight, which is weights[group.weight], all of one shape, type and form; product.weight is
// any of them. Row r of y comes from row sources[r] of x, or where that is null from row r.
struct GroupedArgs {
    LinearArgs product;
    const PackedWeight* weights;
    const RowGroup* groups;
    int64_t num_groups;
    const int32_t* sources;
};

// The functions of a kind of weight: one product, and those of groups of rows.
struct ProductKernels {
    Kernel<LinearArgs> linear = nullptr;
    Kernel<GroupedArgs> grouped = nullptr;
};

enum class RouterScore : int32_t { softmax, sigmoid, softmax_topk, sigmoid_topk, sparsemixer };

// The experts that tokens choose by their logits [T, experts], and how the results are weighed; see
// ops/routing.py. select_bias and expert_scales [experts] may be null. chosen and weights [T,
// top_k].
struct RouteArgs {
    Type type;  // of the logits
    int64_t experts;
    int64_t top_k;
    RouterScore score;
    bool renorm;
    int64_t groups;
    int64_t top_groups;
    int64_t group_best;
    float scale;
    float renorm_eps;
    float renorm_min;
    float jitter;
    Rows logits;
    const float* select_bias;
    const float* expert_scales;
    int32_t* chosen;
    float* weights;
};

// y = the chosen experts' results on x, weighed and added in fp32 in the order of the choice; see
// ops/moe.py. up and down [experts]: the weights of their products, each of one shape and form.
// chosen and weights [T, top_k]. weighs_input: a choice's weight multiplies the expert's input.
//
// slots [T]: of the adapters of the tokens, or null; the banks have that of slot s and expert e in
// slot s * experts + e, and a bank without values adds nothing.
struct ExpertsArgs {
    int64_t experts;
    int64_t top_k;
    const PackedWeight* up;
    const PackedWeight* down;
    ProductKernels up_product;
    ProductKernels down_product;
    Finish finish;  // of up
    Rows x;
    Rows y;
    const int32_t* chosen;
    const float* weights;
    bool weighs_input;
    bool is_streamed;  // see PackedWeight
    const int32_t* slots;
    LoraBank up_bank;
    LoraBank down_bank;
    Kernel<LoraShrinkArgs> shrink;
};

// What a piece of a tensor has; sums: see scan.cpp, where they are asked for.
struct ScanResult {
    uint64_t has_nan;
    uint64_t sums[2];
};

// Bytes of a piece, by which the numbers of no type are cut.
constexpr int64_t kScanPiece = 256 << 10;

// The bytes of a tensor that has numbers of a type, a piece as a "token". Its sums are those of its
// pieces. results: of all pieces. copy: where the bytes are written, too, as those of weights are:
// past the caches; or null.
struct ScanArgs {
    Type type;
    const uint8_t* data;
    int64_t bytes;
    bool adds_up;
    ScanResult* results;
    uint8_t* copy;
};

// A source [outputs.count, in], its rows as "tokens", into the panels of a weight. has_nan: set to 1
// if there is NaN in the source; or null.
struct PackArgs {
    PackedWeight weight;
    Rows source;
    void* panels;
    Outputs outputs;
    uint32_t* has_nan;
};

// The same into int8 or int4; `panels` and `scales` are zero and those of the weight. peaks: see
// LinearArgs, for the rows of the source.
struct PackQuantizedArgs {
    PackedWeight weight;
    Rows source;
    uint8_t* panels;
    float* scales;
    const float* peaks;
    Outputs outputs;
    uint32_t* has_nan;
};

// Codes [out, in] and, [out, groups] each, scales and zero points (or null) into `panels`, which
// are zero and those of the weight. Two codes of four bits share a byte, the even one in its lower
// half.
struct PackCodedArgs {
    PackedWeight weight;
    const uint8_t* codes;
    const void* scales;
    const uint8_t* zeros;
    uint8_t* panels;
};

// KV memory of one layer. Head k of block n has its part at data + (n * kv_heads + k) * head_bytes:
// its keys, then its values at `values`, each part from a multiple of 64 bytes on.
//
// Keys lie in tiles of `tile` slots, transposed, so that a vector is one element of 16 keys:
// element d of slot i of a tile at (d / pack * tile + i) * pack + d % pack, where pack is 2 for
// bf16, 4 for bytes (what dot products take comes with one load; what is beyond head_dim is zero or,
// for bytes, anything) and 1 otherwise. `tile` is 16 where block_size is a multiple of it, else block_size. Values lie slot
// after slot. is_int8: one byte each, times an fp32 scale per slot, at `key_scales` and
// `value_scales`.
struct KVMemory {
    char* data;
    int64_t num_blocks;
    int64_t block_size;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t tile;
    int64_t head_bytes;
    int64_t values;
    int64_t key_scales;
    int64_t value_scales;
    bool is_int8;
};

enum class NormOver : int32_t { none, head, full };

// From qkv rows [(H+2K)*D] to q [H, D] and the KV memory; see ops/rotary.py. heads counts those of
// the queries; cos_sin is null where nothing rotates, clip infinite where nothing is clipped.
struct RopeStoreArgs {
    Type type;
    int64_t heads;
    Rows qkv;
    void* q;
    KVMemory kv;
    const int64_t* slots;
    const int64_t* positions;
    const float* cos_sin;
    int64_t num_positions;
    int64_t rotary_dim;
    bool is_interleaved;
    NormOver norm_over;
    bool is_norm_last;
    NormParams q_norm;
    NormParams k_norm;
    float clip;
};

// The rows of a step, for attention: row r has the tokens query_start[r] .. query_start[r + 1] - 1,
// seq_lens[r] tokens with them, and its block ids at table + table_row[r] * table_stride. It lies
// in memory of its own and is filled anew for every step, so that a recorded call sees the new
// rows.
struct AttentionStep {
    int64_t num_rows;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* table;
    const int32_t* table_row;
    int64_t table_stride;
    // 1: the row's new tokens also see those after them; 2: and each other beyond the window; 0:
    // they do not, as where there is no array.
    const int32_t* whole = nullptr;

    bool is_whole(int64_t row) const { return whole != nullptr && whole[row] != 0; }
};

// One value per head, or none.
struct PerHead {
    const void* data;
    Type type;
};

// out [T, H*D] = attention of q; see ops/attention.py. No window is 0, no cap is 0.
struct AttendArgs {
    Type type;
    int64_t heads;
    Rows q;
    void* out;
    KVMemory kv;
    const AttentionStep* step;
    int64_t window;
    double scale;
    double softcap;
    PerHead sinks;
    PerHead alibi;
};

// out [T, H*D] = attention of q within prompts that the step has whole; see ops/mixers/prompts.py.
// Of the step it reads the rows' tokens. No window is 0.
struct AttendPromptsArgs {
    Type type;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    Rows q;
    Rows k;
    Rows v;
    void* out;
    const AttentionStep* step;
    int64_t window;
    double scale;
};

// Latents of one layer, see ops/kv.py: of slot i of block n, `rank` values of the normed latent and
// then `rotated` values of the key at data + n * block_bytes + i * (rank + rotated) elements.
struct LatentMemory {
    char* data;
    int64_t num_blocks;
    int64_t block_size;
    int64_t block_bytes;
    int64_t rank;
    int64_t rotated;
};

// From queries [H, rotated] and x [rank + rotated] of each token to rotated queries `out` and the
// latents; see ops/mixers/latent.py. cos_sin is null where nothing rotates.
struct LatentStoreArgs {
    Type type;
    int64_t heads;
    Rows q;
    void* out;
    Rows x;
    LatentMemory latents;
    const int64_t* slots;
    const int64_t* positions;
    const float* cos_sin;
    int64_t num_positions;
    bool is_interleaved;
    NormParams norm;
};

// out [T, H, rank] = attention of q [H, rank] and q_rotated [H, rotated] of each token.
struct LatentAttendArgs {
    Type type;
    int64_t heads;
    Rows q;
    Rows q_rotated;
    void* out;
    LatentMemory latents;
    const AttentionStep* step;
    double scale;
};

// Where rows find and keep their recurrent state, by token; see ops/batch.py (StateBatch). The part
// of a state that an operation works on begins at data + block * block_bytes.
struct States {
    char* data;
    int64_t block_bytes;
    int64_t num_blocks;
    const int64_t* reads;
    const int64_t* writes;
};

// out = after * act(conv(before * x)) over channels; see ops/mixers/state.py, as for those below.
// weight [kernel, width] and bias [width] in the type; bias, before and after may be null. act:
// none or silu.
struct ShortConvArgs {
    Type type;
    int64_t width;
    int64_t kernel;
    Act act;
    Rows x;
    Rows before;
    Rows after;
    Rows out;
    const void* weight;
    const void* bias;
    States states;
};

// A state [size, width] in fp32. decay [size, width], skip [width]; gate may be null.
struct MambaScanArgs {
    Type type;
    int64_t width;
    int64_t size;
    Rows x;
    Rows dt;
    Rows b;
    Rows c;
    Rows gate;
    Rows out;
    const float* decay;
    const float* skip;
    States states;
};

// States [heads, size, dim] in fp32; b and c have a row of `size` for each group of heads. decay,
// skip and dt_bias [heads].
struct Mamba2ScanArgs {
    Type type;
    int64_t heads;
    int64_t dim;
    int64_t size;
    int64_t groups;
    Rows x;
    Rows dt;
    Rows b;
    Rows c;
    Rows out;
    const float* decay;
    const float* skip;
    const float* dt_bias;
    float least_step;
    float largest_step;
    States states;
};

// States [heads, size, dim] in fp32; q and k have a row of `size` for each of key_heads. decay and
// dt_bias [heads].
struct GatedDeltaArgs {
    Type type;
    int64_t heads;
    int64_t key_heads;
    int64_t dim;
    int64_t size;
    Rows q;
    Rows k;
    Rows v;
    Rows a;
    Rows b;
    Rows out;
    float eps;  // under the root of a query's or key's length
    const float* decay;
    const float* dt_bias;
    States states;
};

// out = norm of each group of y, with silu(gate). weight [width], or [group] where it is shared by
// all groups; null: no norm, and gate_first.
struct GatedNormArgs {
    Type type;
    int64_t width;
    int64_t group;
    bool gate_first;
    Rows y;
    Rows gate;
    Rows out;
    const void* weight;
    bool is_weight_shared;
    float eps;
};

// Bytes of a piece of memory, which are the "tokens" of ReadArgs.
constexpr int64_t kReadPiece = 1 << 20;

// Read memory and do nothing with it; see limits.cpp.
struct ReadArgs {
    const void* data;
};

enum class Operand : int32_t { f32, bf16, int8 };

// Multiply and add on registers, in tiles of `rounds`; *operations becomes the work in all tiles.
// `start` is aligned to 64 and holds zeros that the compiler must not know of.
constexpr int64_t kStartBytes = 1024;
struct MultiplyArgs {
    Operand operand;
    int64_t rounds;
    const void* start;
    int64_t* operations;
};

// Logits [T, width] of fp32, rows `stride` elements apart; width > 0.
struct LogitsRows {
    const float* data;
    int64_t stride;
    int64_t width;
};

// The largest entry of each row; see ops/sampling/sample.py, as for the three below.
struct GreedyArgs {
    LogitsRows logits;
    int64_t* ids;
    float* values;
};

// A token of each row: settings [T, 4], keys [T, 2], hashes [width].
struct DrawArgs {
    LogitsRows logits;
    const double* settings;
    const int32_t* keys;
    const int32_t* hashes;
    int64_t* ids;
    float* peaks;
};

// out [T, width]: what temperature and filters leave.
struct TruncateArgs {
    LogitsRows logits;
    const double* settings;
    float* out;
};

// Peak, log of the sum and rank of a token [T]; the largest entries [T, num_top].
struct RankArgs {
    LogitsRows logits;
    const int64_t* token_ids;
    int64_t num_top;
    int32_t* top_ids;
    float* top_values;
    int32_t* ranks;
    float* peaks;
    float* log_sums;
};

// The functions of one level; a level that brings none of its own keeps those of the level before.
struct Kernels {
    Kernel<NormArgs> norm;
    Kernel<AddArgs> add;
    Kernel<AddNormArgs> add_norm;
    Kernel<EmbedArgs> embed;
    Kernel<ScaleGateArgs> scale_gate;
    Kernel<SumChunksArgs> sum_chunks;
    Kernel<RopeStoreArgs> rope_store;
    Kernel<AttendArgs> attend[kNumTypes];  // by the type of the activations and of memory
    Kernel<AttendArgs> attend_bytes[kNumTypes];  // over memory that is_int8
    Kernel<AttendPromptsArgs> attend_prompts;
    Kernel<LatentStoreArgs> latent_store;
    Kernel<LatentAttendArgs> latent_attend;
    Kernel<ShortConvArgs> short_conv;
    Kernel<MambaScanArgs> mamba_scan;
    Kernel<Mamba2ScanArgs> mamba2_scan;
    Kernel<GatedDeltaArgs> gated_delta;
    Kernel<GatedNormArgs> gated_norm;
    ProductKernels linear[kNumTypes];  // by the type of the weight
    Kernel<LinearTotalArgs> linear_total;
    Kernel<HeadsArgs> heads_linear[kNumTypes];
    ProductKernels linear_quantized;
    ProductKernels linear_dequantized;  // of weights with is_weight_only
    ProductKernels linear_coded;        // of weights in codes
    // The same for rows in 16 bits that keep their values and codes of four and of eight bits, in
    // groups of at least digit_group inputs; null where linear_coded is as fast for many rows.
    ProductKernels linear_digits4;
    ProductKernels linear_digits8;
    int64_t digit_group;
    Kernel<RouteArgs> route;
    Kernel<ExpertsArgs> experts;
    Kernel<LoraShrinkArgs> lora_shrink;
    Kernel<LoraExpandArgs> lora_expand;
    Kernel<LoraEmbedArgs> lora_embed;
    Kernel<PackArgs> pack;
    Kernel<PackQuantizedArgs> pack_quantized;
    Kernel<PackCodedArgs> pack_coded;
    Kernel<ScanArgs> scan;
    Kernel<ReadArgs> read;
    Kernel<MultiplyArgs> multiply_add;
    Kernel<GreedyArgs> greedy;
    Kernel<DrawArgs> draw;
    Kernel<TruncateArgs> truncate;
    Kernel<RankArgs> rank;
};

}  // namespace quire
