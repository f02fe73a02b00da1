"""What a call of each op costs at least: formulas of its arguments, which benchmarks compare with
the limits of a machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from quire.models.loading.model_parts import tensors_within
from quire.ops import AttentionPlan, LayerKV
from quire.ops.kv import LARGEST_NUMBER, SCALE_BYTES, BlockIds, BlockMemory
from quire.ops.segments import Addend


class Cost(NamedTuple):
    """The least memory traffic of a call, and its arithmetic."""

    num_bytes: int
    flops: int = 0


def nbytes(*parts: object) -> int:
    """What tensors and packed weights take in memory; None takes nothing."""
    return sum(tensor.nbytes for part in parts for tensor in tensors_within(part))


# rows


def embed(ids, table, scale, positions=None, position_table=None) -> Cost:
    width = table.shape[1]
    return Cost(ids.numel() * (8 + 2 * width * table.element_size()), ids.numel() * width)


def norm(x, n) -> Cost:
    return Cost(2 * nbytes(x) + nbytes(n.weight, n.bias), 4 * x.numel())


def add(x, delta, scale=1.0) -> Cost:
    return Cost(3 * nbytes(x), 2 * x.numel())


def add_norm(x, delta, n, scale=1.0) -> Cost:
    return Cost(4 * nbytes(x) + nbytes(n.weight, n.bias), 6 * x.numel())


def scale_gate(y, gate) -> Cost:
    return Cost(2 * nbytes(y) + nbytes(gate), y.numel() + 4 * gate.numel())


def multiply(x, factors) -> Cost:
    return Cost(2 * nbytes(x), x.numel())


def modulate(x, by, act) -> Cost:
    return Cost(3 * nbytes(x), 5 * x.numel())


def sparse_gated(gate_up, act, deviations) -> Cost:
    return Cost(3 * nbytes(gate_up) // 2, 7 * gate_up.numel())


def bounded_gated(gate_up, act, bound) -> Cost:
    return Cost(3 * nbytes(gate_up) // 2, 4 * gate_up.numel())


def clamped_gated(gate_up, limit) -> Cost:
    return Cost(3 * nbytes(gate_up) // 2, 4 * gate_up.numel())


def scale_heads(y, gate) -> Cost:
    return scale_gate(y, gate)


def streams(x: Tensor, **other: Any) -> Cost:
    """All streams are read and written; a share of each joins each."""
    return Cost(2 * nbytes(x) + nbytes(*other.values()), 4 * x.numel())


enter_streams = predict_streams = correct_streams = add_to_streams = expand_streams = streams


def join_streams(x, other) -> Cost:
    return Cost(2 * nbytes(x, other), 0)


def add_matched(total, y, like) -> Cost:
    return Cost(4 * nbytes(total), 6 * total.numel())


def xielu(x, numbers) -> Cost:
    return Cost(2 * nbytes(x), 10 * x.numel())


def row_peaks(x) -> Cost:
    return Cost(nbytes(x), x.numel())


def sum_chunks(x, chunks, spans, rest) -> Cost:
    """The chunks' rows are read once, the sums read and written."""
    count = int(chunks[:, 2].sum())
    return Cost(count * nbytes(x[:1]) + 2 * nbytes(spans, rest), count * x.shape[1])


# products with weights


def embed_packed(ids, w, scale=1.0) -> Cost:
    num_bytes = ids.numel() * (8 + 2 * nbytes(w) // w.out_features)
    return Cost(num_bytes, ids.numel() * w.in_features)


def linear(x, w, addend=None) -> Cost:
    rows = x.numel() // w.in_features
    added = 0 if addend is None else _of_addend(addend)
    num_bytes = nbytes(x, w) + rows * w.out_features * x.element_size() + added
    return Cost(num_bytes, 2 * x.numel() * w.out_features)


def _of_addend(addend: Any) -> int:
    """Of one in the provider's own form: its factors, without the matrices of its slots."""
    if isinstance(addend, Addend):
        return nbytes(addend.rows) + nbytes(addend.values)
    return nbytes(addend.factors) + nbytes(addend.slots)


def lora_embed(x, ids, **_) -> Cost:
    return Cost(2 * nbytes(x) + nbytes(ids), 2 * x.numel())


def hidden(x, up, act, gated, addend=None) -> Cost:
    product = linear(x, up, addend)
    unwritten = x.shape[0] * up.out_features // 2 * x.element_size() if gated else 0
    return product._replace(num_bytes=product.num_bytes - unwritten)


def logits(x, head, scale, softcap, addend=None) -> Cost:
    product = linear(x, head, addend)
    return product._replace(num_bytes=product.num_bytes + 2 * x.shape[0] * head.out_features)


def linear_partial(x, w, peaks=None) -> Cost:
    product = linear(x, w)
    return product._replace(num_bytes=product.num_bytes + 4 * x.shape[0] * w.out_features)


def linear_total(parts, w, peaks, dtype, addend=None) -> Cost:
    return Cost(nbytes(parts) + parts[:, 0].numel() * dtype.itemsize, parts.numel())


def route(logits, args, select_bias=None, expert_scales=None) -> Cost:
    chosen = 8 * len(logits) * args.top_k
    return Cost(nbytes(logits, select_bias, expert_scales) + chosen, 4 * logits.numel())


def route_softplus(logits, top_k, **_) -> Cost:
    return Cost(nbytes(logits) + 8 * len(logits) * top_k, 4 * logits.numel())


def moe(x, chosen, weights, experts, args, **_) -> Cost:
    used = len(chosen.unique())
    per_expert = nbytes(experts) // x.element_size() // experts.experts
    return Cost(
        2 * nbytes(x) + nbytes(chosen, weights) + nbytes(experts) * used // experts.experts,
        2 * chosen.numel() * per_expert,
    )


# KV memory and attention


def blocks(
    kv: BlockMemory,
    block_ids: BlockIds = (),
    data: Tensor | None = None,
    src_ids: BlockIds = (),
    dst_ids: BlockIds = (),
) -> Cost:
    count = len(block_ids) + len(src_ids)
    return Cost(2 * count * sum(part[:1].nbytes for part in kv.parts))


export_kv = import_kv = copy_kv = blocks


def zero_kv(kv, block_ids) -> Cost:
    return Cost(blocks(kv, block_ids).num_bytes // 2)


def scale_queries(q, positions, factors) -> Cost:
    return Cost(2 * nbytes(q) + 12 * len(q), q.numel())


def mix_axes(positions, table, axes) -> Cost:
    return Cost(nbytes(positions) + positions.shape[1] * (8 * table.shape[1] + 8))


def rope_store(qkv, kv, slots, **_) -> Cost:
    return Cost(2 * nbytes(qkv) + 2 * nbytes(slots), 6 * qkv.numel())


def rope_queries(q, **_) -> Cost:
    return Cost(2 * nbytes(q), 6 * q.numel())


def attend(q, kv, plan, args) -> Cost:
    num_keys, num_pairs = counted(plan)
    num_bytes = 2 * nbytes(q) + 2 * num_keys * kv.kv_heads * vector_bytes(kv)
    return Cost(num_bytes, 4 * num_pairs * q.shape[1] * q.shape[2])


def attend_prompts(q, k, v, plan, scale, window) -> Cost:
    lengths = plan.lengths[0].astype(np.int64)
    # of n tokens, each sees itself and up to `reach` on both sides
    reach = np.minimum(lengths, window or lengths.max(initial=0)) - 1
    pairs = lengths + 2 * (lengths * reach - reach * (reach + 1) // 2)
    return Cost(nbytes(q, q, k, v), 4 * int(pairs[lengths > 0].sum()) * q.shape[1] * q.shape[2])


def attend_relative(q, k, v, plan, relative, scale, window) -> Cost:
    plain = attend_prompts(q, k, v, plan, scale, window)
    tables = [t for t in (relative.keys, relative.queries) if t is not None]
    products = sum(2 * len(q) * table.numel() for table in tables)
    return Cost(plain.num_bytes + nbytes(*tables), plain.flops + products)


def counted(plan: AttentionPlan) -> tuple[int, int]:
    """Keys that the rows see, each counted once a row, and (query, visible key) pairs."""
    num_new, seq_lens = plan.lengths
    low, high = (seq_lens - num_new).astype(np.int64), seq_lens.astype(np.int64)
    if plan.window is None:
        return int(high[num_new > 0].sum()), int((high * (high + 1) - low * (low + 1)).sum()) // 2
    first = np.maximum(low + 1 - plan.window, 0)
    # a token at position p sees p + 1 keys up to the window, and then as many as the window has
    a, b = np.minimum(low, plan.window), np.minimum(high, plan.window)
    pairs = (b * (b + 1) - a * (a + 1)) // 2 + plan.window * (high - low - (b - a))
    return int((high - first)[num_new > 0].sum()), int(pairs.sum())


def vector_bytes(kv: LayerKV) -> int:
    """What a key or a value of one head takes in memory, its scale included."""
    has_scales = kv.dtype in LARGEST_NUMBER
    return kv.head_dim * kv.dtype.itemsize + SCALE_BYTES * has_scales


# latent attention


def heads_linear(x, w) -> Cost:
    rows = x.shape[0] * x.shape[1]
    num_bytes = nbytes(x, w) + rows * w.out_features * x.element_size()
    return Cost(num_bytes, 2 * x.numel() * w.out_features)


def latent_store(q, x, latents, slots, **_) -> Cost:
    return Cost(2 * nbytes(q, x, slots), 6 * (q.numel() + x.numel()))


def latent_attend(q, q_rotated, latents, plan, scale) -> Cost:
    num_keys, num_pairs = counted(plan)
    num_bytes = 2 * nbytes(q) + nbytes(q_rotated)
    num_bytes += num_keys * latents.width * latents.data.element_size()
    return Cost(num_bytes, 2 * num_pairs * q.shape[1] * (latents.width + latents.rank))


def index_select(q, k, weights, latents, slots, plan, top_k) -> Cost:
    num_keys, num_pairs = counted(plan)
    num_bytes = nbytes(q, weights, slots) + 2 * nbytes(k) + 8 * len(q) * top_k
    num_bytes += num_keys * k.shape[1] * k.element_size()
    return Cost(num_bytes, 2 * num_pairs * q.shape[1] * (q.shape[2] + 1))


def indexed_attend(q, q_rotated, chosen, latents, plan, scale) -> Cost:
    num_pairs = int((chosen >= 0).sum())
    num_bytes = 2 * nbytes(q) + nbytes(q_rotated, chosen)
    num_bytes += num_pairs * latents.width * latents.data.element_size()
    return Cost(num_bytes, 2 * num_pairs * q.shape[1] * (latents.width + latents.rank))


def block_select(q, k, latents, slots, plan, **facts) -> Cost:
    num_keys, num_pairs = counted(plan)
    num_bytes = nbytes(q, slots) + 2 * nbytes(k) + 8 * q.shape[0] * q.shape[1] * facts["top_k"]
    num_bytes += num_keys * k.shape[1] * k.element_size()
    return Cost(num_bytes, 2 * num_pairs * q.shape[1] * q.shape[2])


def block_attend(q, k, v, chosen, size, **_) -> Cost:
    """All tokens of chosen blocks, though the last may have fewer."""
    num_pairs = int((chosen >= 0).sum()) * size
    num_bytes = 2 * nbytes(q, k, v) + nbytes(chosen)
    num_bytes += 2 * num_pairs * q.shape[2] * q.element_size()
    return Cost(num_bytes, 4 * num_pairs * (q.shape[1] // chosen.shape[1]) * q.shape[2])


def recent_store(q, key, rest, **_) -> Cost:
    return Cost(2 * nbytes(q, key, rest), 3 * (q.numel() + key.numel()))


def entry_select(q, latents, entry_plan, by, **facts) -> Cost:
    num_keys, num_pairs = (count // by.rate for count in counted(entry_plan))
    num_bytes = nbytes(q, facts["weights"]) + 8 * len(q) * facts["top_k"]
    num_bytes += num_keys * q.shape[2] * q.element_size()
    return Cost(num_bytes, 2 * num_pairs * q.shape[1] * (q.shape[2] + 1))


def recent_attend(q, recent, plan, **facts) -> Cost:
    """As if each token saw a whole window."""
    chosen, entry_plan, by = (facts.get(name) for name in ("chosen", "entry_plan", "by"))
    num_pairs = len(q) * facts["window"]
    if chosen is not None:
        num_pairs += int((chosen >= 0).sum())
    elif by is not None:
        num_pairs += counted(entry_plan)[1] // by.rate
    num_bytes = 2 * nbytes(q) + num_pairs * q.shape[2] * q.element_size()
    return Cost(num_bytes, 4 * num_pairs * q.shape[1] * q.shape[2])


def collapse_streams(x, w, count) -> Cost:
    return Cost(nbytes(x) + nbytes(w.weight), 2 * len(x) * w.weight.numel() + 2 * x.numel())


# recurrent states


def _walked(states: Tensor, reads: Tensor, writes: Tensor) -> int:
    """Bytes of the states that are read and written."""
    count = int((reads >= 0).sum()) + int((writes >= 0).sum())
    return count * states[:1].numel() * states.element_size()


def short_conv(
    x, states, reads, writes, weight, bias=None, act=None, before=None, after=None
) -> Cost:
    rows = 2 * x.numel() * x.element_size() + nbytes(before, after)
    num_bytes = rows + nbytes(weight, bias) + _walked(states, reads, writes)
    return Cost(num_bytes, 2 * x.numel() * len(weight))


def mamba_scan(x, states, reads, writes, **other) -> Cost:
    rows = 2 * nbytes(x) + nbytes(*other.values())
    per_token = states[:1].numel()
    return Cost(rows + _walked(states, reads, writes), 6 * len(x) * per_token)


def mamba2_scan(x, states, reads, writes, **other) -> Cost:
    return mamba_scan(x, states, reads, writes, **other)


def gated_delta(v, states, reads, writes, **other) -> Cost:
    return mamba_scan(v, states, reads, writes, **other)


def channel_delta(v, states, reads, writes, **other) -> Cost:
    tensors = {name: value for name, value in other.items() if isinstance(value, Tensor)}
    return mamba_scan(v, states, reads, writes, **tensors)


def gated_linear(x, states, reads, writes, **other) -> Cost:
    rows = 2 * nbytes(x) + nbytes(*other.values())
    return Cost(rows + _walked(states, reads, writes), 12 * x.numel())


def gated_norm(y, gate, n, group, gate_first) -> Cost:
    weight = None if n is None else n.weight
    return Cost(2 * nbytes(y) + nbytes(gate, weight), 10 * y.numel())


# logits


def mask_logits(logits, rows, mask) -> Cost:
    """Each entry of the rows is decided on, and written at most once."""
    entries = len(rows) * logits.shape[1]
    return Cost(nbytes(mask) + entries * logits.element_size(), entries)


def bias_logits(logits, places, entries, values) -> Cost:
    count = len(entries)
    return Cost(nbytes(entries, values) + 2 * logits.element_size() * count, count)


def penalize(logits, history, places, penalties) -> Cost:
    """The ids, and their logits twice, counted as if no id came twice."""
    count = int(places[:, 3].sum())
    return Cost(count * (history.element_size() + 2 * logits.element_size()), 4 * count)


def forbid_words(logits, history, places, words) -> Cost:
    """Each word is compared with as many tokens as it has before its last."""
    compared = words[:, 1:-1].numel()
    return Cost(nbytes(words) + compared * history.element_size(), compared)


def greedy(logits) -> Cost:
    return Cost(nbytes(logits), logits.numel())


def weighed(logits: Tensor, **_: Any) -> Cost:
    """Entries are read once; a difference and an exponential for each."""
    return Cost(nbytes(logits), 2 * logits.numel())


draw = rank = weighed


def truncate(logits, settings) -> Cost:
    return Cost(2 * nbytes(logits), 2 * logits.numel())
