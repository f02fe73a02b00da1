"""The conformance checks must see these bugs: plausible slips in one op, on some case of it."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from quire.ops import CodedWeight, Facts, bind, select
from quire.ops.attention_plan import plan_rows
from tests.support import op_contracts
from tests.support.op_cases import CASES, CODED_CASES, FP8_CASES
from tests.support.op_conformance import Fenced, check, check_error, results_of
from tests.support.recurrent.planted import planted

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DTYPE = torch.float32
PLAIN = select(device="cpu", dtype=DTYPE, providers=["torch"])


ORACLE = bind(Facts(torch.device("cpu"), DTYPE), op_contracts.ORACLE, ["oracle"])


def wrong_arguments(op, **wrong):
    """Other values of arguments that the op gets."""
    return {op: lambda *args, **keywords: getattr(PLAIN, op)(*args, **{**keywords, **wrong})}


def changed_arguments(op, **changes):
    """Arguments of the op, which are given by name, after these changes."""

    def run(**given):
        changed = {name: change(given[name]) for name, change in changes.items()}
        return getattr(PLAIN, op)(**given | changed)

    return {op: run}


def changed_fields(op, argument, **changes):
    """One of the op's arguments, where there is one, after changes of its fields."""

    def run(**given):
        value = given[argument]
        if value is not None:
            changed = {name: change(getattr(value, name)) for name, change in changes.items()}
            value = dataclasses.replace(value, **changed)
        return getattr(PLAIN, op)(**given | {argument: value})

    return {op: run}


def wrong_args(op, **wrong):
    return changed_fields(op, "args", **{name: lambda _, x=x: x for name, x in wrong.items()})


def with_scales(change):
    """Attention that takes other scales where the memory has some [*, 2, K]."""
    return changed_fields("attend", "kv", scales=lambda x: None if x is None else change(x))


def relative_with(**changes):
    """Other tables of what distances add to scores."""
    return changed_fields("attend_relative", "relative", **changes)


def with_plan(change):
    """Plans made from changed facts; the table's entries beyond a length are made readable."""

    def plan_attention(*, query_start, seq_lens, block_table, block_size, window, kv_heads=None):
        readable = block_table.where((block_table >= 0) & (block_table < 2**30), 0)
        facts = change(query_start, seq_lens, readable, block_size, window)
        return dataclasses.replace(plan_rows(*facts), window=window)

    return {"plan_attention": plan_attention}


def wider_window(query_start, seq_lens, block_table, block_size, window):
    return query_start, seq_lens, block_table, block_size, window and window + 1


def narrower_window(query_start, seq_lens, block_table, block_size, window):
    return query_start, seq_lens, block_table, block_size, max(1, window - 1) if window else None


def no_window(query_start, seq_lens, block_table, block_size, window):
    return query_start, seq_lens, block_table, block_size, None


def one_too_long(query_start, seq_lens, block_table, block_size, window):
    return query_start, seq_lens + 1, block_table, block_size, window


def one_too_short(query_start, seq_lens, block_table, block_size, window):
    shorter = seq_lens - (seq_lens > query_start[1:] - query_start[:-1])
    return query_start, shorter, block_table, block_size, window


def swapped_blocks(query_start, seq_lens, block_table, block_size, window):
    table = block_table.clone()
    full = (seq_lens >= 2 * block_size).nonzero()[0]
    table[full, :2] = table[full, :2].flip(1)
    return query_start, seq_lens, table, block_size, window


def without_padding_mask():
    def plan_attention(**facts):
        plan = PLAIN.plan_attention(**facts)
        decode = tuple(dataclasses.replace(rows, is_padded=False) for rows in plan.decode)
        return dataclasses.replace(plan, decode=decode)

    return {"plan_attention": plan_attention}


def everything_causal_from_zero():
    def plan_attention(**facts):
        plan = PLAIN.plan_attention(**facts)
        prefill = tuple(
            dataclasses.replace(
                row, tiles=tuple(dataclasses.replace(t, is_causal=True) for t in row.tiles)
            )
            for row in plan.prefill
        )
        return dataclasses.replace(plan, prefill=prefill)

    return {"plan_attention": plan_attention}


def masked_by_zero_weight():
    """Padding whose weights are 0 but whose values are read: 0 * NaN."""

    def plan_attention(**facts):
        plan = PLAIN.plan_attention(**facts)
        decode = tuple(
            dataclasses.replace(rows, lanes=rows.lanes.where(rows.lanes > 0, -2))
            for rows in plan.decode
        )
        return dataclasses.replace(plan, decode=decode)

    def attend(q, kv, plan, args):
        lanes = [
            dataclasses.replace(rows, lanes=rows.lanes % kv.lanes.shape[0]) for rows in plan.decode
        ]
        return PLAIN.attend(q, kv, dataclasses.replace(plan, decode=tuple(lanes)), args)

    return {"plan_attention": plan_attention, "attend": attend}


def attend_that_clears_the_cache(q, kv, plan, args):
    y = PLAIN.attend(q, kv, plan, args)
    kv.k[-1].zero_()
    return y


def padding_to_last_slot(qkv, kv, slots, positions, **facts):
    slots = slots.where(slots >= 0, kv.num_blocks * kv.block_size - 1)
    return PLAIN.rope_store(qkv, kv, slots, positions, **facts)


def swap_pairing(table):
    return table and dataclasses.replace(table, interleaved=not table.interleaved)


def norm_on_the_other_side(qk_norm):
    if qk_norm is None or qk_norm.over == "full":
        return qk_norm
    return dataclasses.replace(qk_norm, after_rope=not qk_norm.after_rope)


def latent_plan(change):
    """As `with_plan`, for latents."""

    def plan_latent(*, query_start, seq_lens, block_table, block_size):
        readable = block_table.where((block_table >= 0) & (block_table < 2**30), 0)
        return plan_rows(*change(query_start, seq_lens, readable, block_size, None))

    return {"plan_latent": plan_latent}


def norm_of_latent_and_key(q, x, latents, slots, positions, *, norm, rotary):
    whole = dataclasses.replace(norm, weight=F.pad(norm.weight, (0, x.shape[1] - latents.rank)))
    y = PLAIN.norm(x, whole)
    x = torch.cat((y[:, : latents.rank], x[:, latents.rank :]), 1)
    one = dataclasses.replace(norm, weight=torch.ones_like(norm.weight), eps=0.0)
    return PLAIN.latent_store(q, x, latents, slots, positions, norm=one, rotary=rotary)


def latent_padding_to_last_slot(q, x, latents, slots, positions, **facts):
    slots = slots.where(slots >= 0, latents.num_blocks * latents.block_size - 1)
    return PLAIN.latent_store(q, x, latents, slots, positions, **facts)


def nowhere(slots):
    return torch.full_like(slots, -1)


def choice_by_signed_scores(q, k, weights, latents, slots, plan, top_k):
    with mock.patch.object(torch.Tensor, "relu", lambda x: x):
        return PLAIN.index_select(q, k, weights, latents, slots, plan, top_k)


def bias_within_the_scale(q, k, v, plan, relative, *, scale, window):
    bias = None if relative.bias is None else relative.bias * scale
    relative = dataclasses.replace(relative, bias=bias)
    return PLAIN.attend_relative(q, k, v, plan, relative, scale=scale, window=window)


def eps_outside_the_root(x, n):
    if n.kind != "rms":
        return PLAIN.norm(x, n)
    return x / (x.square().mean(-1, keepdim=True).sqrt() + n.eps) * n.weight


def gate_and_up_swapped(x, up, act, gated, addend=None):
    if not gated or act != "silu":
        return PLAIN.hidden(x, up, act, gated, addend)
    first, second = F.linear(x, up.weight, up.bias).chunk(2, -1)
    return F.silu(second) * first


def weighs_biased_scores(logits, args, select_bias=None, expert_scales=None):
    if select_bias is None or args.score != "sigmoid":
        return PLAIN.route(logits, args, select_bias, expert_scales)
    biased = logits.sigmoid() + select_bias
    chosen, _ = PLAIN.route(logits, args, select_bias)
    weights = biased.gather(1, chosen.long())
    return chosen, weights / weights.sum(-1, keepdim=True) * args.scale


def store_turned_from_the_start(**given):
    turned = {name: given[name].roll(given["rotary"].dim, -1) for name in ("q", "key")}
    return PLAIN.recent_store(**given | turned)


def attend_entries_at_their_number(**given):
    by = given.get("by")
    if by is None:
        return PLAIN.recent_attend(**given)
    numbers = torch.arange(len(by.rotary.cos_sin)) // by.rate
    rotary = dataclasses.replace(by.rotary, cos_sin=by.rotary.cos_sin[numbers])
    return PLAIN.recent_attend(**given | {"by": dataclasses.replace(by, rotary=rotary)})


def expanded_by_rows(x, delta, mix):
    n = x.shape[1] // delta.shape[1]
    rows = mix[:, n:].unflatten(1, (n, n)).transpose(1, 2).flatten(1)
    return PLAIN.expand_streams(x, delta, torch.cat((mix[:, :n], rows), 1))


def routed_by_softplus(**given):
    chosen, weights = PLAIN.route_softplus(**given)
    squared = weights.square()
    return chosen, squared / squared.sum(1, keepdim=True) * given["scale"]


def transposed_matrix(x, routed, weight):
    n = routed.shape[1]
    return PLAIN.predict_streams(x, routed, weight.view(n, n, n).transpose(0, 1).flatten(0, 1))


def copy_in_order(kv, src_ids, dst_ids):
    for src, dst in zip(src_ids, dst_ids, strict=True):
        PLAIN.copy_kv(kv, [src], [dst])


def add_in_place(x, delta, scale=1.0):
    return x.add_(delta, alpha=scale)


def summed_without_spans(x, chunks, spans, rest):
    for i, (start, _, count) in enumerate(chunks.tolist()):
        rest[i] += x[start : start + count].sum(0)


def summed_anew(x, chunks, spans, rest):
    spans.zero_()
    PLAIN.sum_chunks(x, chunks, spans, rest)


def add_into_neighbour(x, delta, scale=1.0):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.add(x, delta, alpha=scale, out=y)
    if y.numel():
        y.as_strided((1,), (1,), y.storage_offset() + y.numel()).zero_()
    return y


def sloppy_sum(x, delta, scale=1.0):
    return (x.bfloat16() + scale * delta.bfloat16()).to(x.dtype)


def at_places(op, **wrong):
    """The op with other columns of its places, each made of all columns."""

    def edit(logits, history, places, *rest, **given):
        columns = list(places.unbind(1))
        for name, f in wrong.items():
            columns[("index", "row", "border", "position").index(name)] = f(*columns)
        getattr(PLAIN, op)(logits, history, torch.stack(columns, 1), *rest, **given)

    return {op: edit}


def bias_of_every_segment(parts, w, peaks, dtype, addend=None):
    bias = w.bias if w.bias is None else w.bias * parts.shape[1]
    return PLAIN.linear_total(parts, dataclasses.replace(w, bias=bias), peaks, dtype, addend)


def bias_in_the_partial_sums(x, w, peaks=None):
    return PLAIN.linear_partial(x, w, peaks) + w.weight[:, 0]


def a_segment_forgotten(x, w, peaks=None):
    return w.partial(x, peaks)[:, 0]


def addend_of_the_next_row(x, w, addend=None):
    if addend is not None:
        addend = dataclasses.replace(addend, rows=addend.rows.roll(1))
    return PLAIN.linear(x, w, addend)


def addend_after_the_activation(x, up, act, gated, addend=None):
    y = PLAIN.hidden(x, up, act, gated)
    if addend is not None:
        has = addend.rows >= 0
        y[has] += addend.values[addend.rows[has].long()][:, : y.shape[1]].to(y.dtype)
    return y


def codes_with(change):
    """Products with weights whose codes were read in another way."""

    def pack_linear(weight, bias, *rest, **given):
        if isinstance(weight, CodedWeight):
            weight = change(weight)
        return PLAIN.pack_linear(weight, bias, *rest, **given)

    return {"pack_linear": pack_linear}


def halves_swapped(w):
    if w.bits == 8:
        return w
    return dataclasses.replace(w, codes=(w.codes << 4) | (w.codes >> 4))


def zero_points_one_less(w):
    return w if w.zeros is None else dataclasses.replace(w, zeros=(w.zeros - 1).clamp(0, 255))


def smallest_floats_lost(w):
    """Those without a leading one."""
    if not w.are_floats:
        return w
    return dataclasses.replace(w, codes=torch.where(w.codes & 0x78 == 0, 0, w.codes))


def sign_forgotten(w):
    return dataclasses.replace(w, codes=w.codes & 127) if w.are_floats else w


def numbers_of_a_table_in_order(w):
    return w if w.table is None else dataclasses.replace(w, table=tuple(sorted(w.table)))


def inverse_order(w):
    return w if w.order is None else dataclasses.replace(w, order=w.order.argsort())


PENALTIES = ("repetition", "frequency", "presence")


def penalize_with(**wrong):
    def penalize(logits, history, places, penalties):
        columns = dict(zip(PENALTIES, penalties.unbind(1), strict=True))
        changed = columns | {name: f(columns[name]) for name, f in wrong.items()}
        PLAIN.penalize(logits, history, places, torch.stack(list(changed.values()), 1))

    return {"penalize": penalize}


BUGS = {
    "codes of a byte swapped": codes_with(halves_swapped),
    "zero points forgotten": codes_with(lambda w: dataclasses.replace(w, zeros=None)),
    "zero points one less": codes_with(zero_points_one_less),
    "scales of the next group": codes_with(
        lambda w: dataclasses.replace(w, scales=w.scales.roll(1, 1))
    ),
    "smallest 8-bit floats lost": codes_with(smallest_floats_lost),
    "sign of 8-bit floats forgotten": codes_with(sign_forgotten),
    "table forgotten": codes_with(lambda w: dataclasses.replace(w, table=None)),
    "table in another order": codes_with(numbers_of_a_table_in_order),
    "order of inputs forgotten": codes_with(lambda w: dataclasses.replace(w, order=None)),
    "order of inputs inverted": codes_with(inverse_order),
    "bias added by each worker": {"linear_total": bias_of_every_segment},
    "bias within the partial sums": {"linear_partial": bias_in_the_partial_sums},
    "a segment forgotten": {"linear_partial": a_segment_forgotten},
    "addend of another row": {"linear": addend_of_the_next_row},
    "addend after the activation": {"hidden": addend_after_the_activation},
    "prompt counted as output": at_places("penalize", border=lambda i, r, b, p: b * 0),
    "one token too many counted": at_places("penalize", position=lambda i, r, b, p: p + 1),
    "newest token not counted": at_places("penalize", position=lambda i, r, b, p: (p - 1).relu()),
    "history of another row": at_places("penalize", row=lambda i, r, b, p: i),
    "logits of another row": at_places("penalize", index=lambda i, r, b, p: i.flip(0)),
    "repetition forgotten": penalize_with(repetition=torch.ones_like),
    "frequency forgotten": penalize_with(frequency=torch.zeros_like),
    "presence upside down": penalize_with(presence=torch.neg),
    "words that begin in the prompt": at_places("forbid_words", border=lambda i, r, b, p: b * 0),
    "words one token ago": at_places("forbid_words", position=lambda i, r, b, p: (p - 1).relu()),
    "bias that cannot forbid": changed_arguments(
        "bias_logits", values=lambda v: v.clamp_min(-1e30)
    ),
    "window one too wide": with_plan(wider_window),
    "window one too narrow": with_plan(narrower_window),
    "window ignored": with_plan(no_window),
    "reads one beyond the length": with_plan(one_too_long),
    "misses the newest key": with_plan(one_too_short),
    "blocks in the wrong order": with_plan(swapped_blocks),
    "padding not masked": without_padding_mask(),
    "causal mask from the upper left": everything_causal_from_zero(),
    "zero times NaN": masked_by_zero_weight(),
    "no softcap": changed_fields("attend", "args", softcap=lambda _: None),
    "no sinks": changed_fields("attend", "args", sinks=lambda _: None),
    "no alibi": changed_fields("attend", "args", alibi=lambda _: None),
    "alibi upside down": changed_fields(
        "attend", "args", alibi=lambda slopes: slopes if slopes is None else -slopes
    ),
    "scale of the head dim": changed_fields("attend", "args", scale=lambda _: 8**-0.5),
    "attention writes to the cache": {"attend": attend_that_clears_the_cache},
    "scales forgotten": with_scales(torch.ones_like),
    "scales of the other head": with_scales(lambda scales: scales.roll(1, -1)),
    "scales of keys for values": with_scales(lambda scales: scales[:, :1].expand_as(scales)),
    "wrong rotary pairing": changed_arguments("rope_store", rotary=swap_pairing),
    "positions shifted": changed_arguments("rope_store", positions=lambda p: (p + 1) % 50),
    "clip forgotten": changed_arguments("rope_store", clip=lambda _: None),
    "q/k norm forgotten": changed_arguments("rope_store", qk_norm=lambda _: None),
    "q/k norm on the wrong side": changed_arguments("rope_store", qk_norm=norm_on_the_other_side),
    "padding written": {"rope_store": padding_to_last_slot},
    "latent one beyond the length": latent_plan(one_too_long),
    "latent misses the newest key": latent_plan(one_too_short),
    "latent blocks in the wrong order": latent_plan(swapped_blocks),
    "latent pairing": changed_arguments("latent_store", rotary=swap_pairing),
    "latent not rotated": changed_arguments("latent_store", rotary=lambda _: None),
    "latent normed with its key": {"latent_store": norm_of_latent_and_key},
    "latent of padding written": {"latent_store": latent_padding_to_last_slot},
    "rotated part of queries forgotten": changed_arguments(
        "latent_attend", q_rotated=torch.zeros_like
    ),
    "distances the other way": relative_with(columns=lambda columns: columns.flip(0)),
    "farthest distance one nearer": relative_with(columns=lambda columns: columns[1:-1]),
    "bias of distances forgotten": relative_with(bias=lambda _: None),
    "bias of distances scaled": {"attend_relative": bias_within_the_scale},
    "keys of positions forgotten": relative_with(keys=lambda _: None),
    "queries of positions forgotten": relative_with(queries=lambda _: None),
    "one weight for all heads": changed_fields(
        "heads_linear", "w", weight=lambda w: w[:1].expand_as(w)
    ),
    "eps outside of the root": {"norm": eps_outside_the_root},
    "gate and up swapped": {"hidden": gate_and_up_swapped},
    "route scale forgotten": wrong_args("route", scale=1.0),
    "route not renormalised": wrong_args("route", renorm=False),
    "route groups forgotten": wrong_args("route", groups=1, top_groups=1),
    "route groups by one score": wrong_args("route", group_best=1),
    "route groups by two scores": wrong_args("route", group_best=2),
    "route jitter forgotten": wrong_args("route", jitter=0.0),
    "route eps forgotten": wrong_args("route", renorm_eps=0.0),
    "route min forgotten": wrong_args("route", renorm_min=0.0),
    "route weighs with the selection bias": {"route": weighs_biased_scores},
    "route scales of experts forgotten": wrong_arguments("route", expert_scales=None),
    "queries not rotated": wrong_arguments("rope_queries", rotary=None),
    "norm of queries forgotten": wrong_arguments("rope_queries", q_norm=None),
    "factors of other columns": {"multiply": lambda x, factors: x * factors.flip(0)},
    "the other one activated": {"modulate": lambda x, by, act: PLAIN.modulate(by, x, act)},
    "gates cut at their mean": wrong_arguments("sparse_gated", deviations=0.0),
    "streams without a common size": {"enter_streams": lambda x, others: torch.cat((x, others), 1)},
    "the other stream first": {"join_streams": lambda x, other: torch.cat((other, x), 1)},
    "share of the first stream": wrong_arguments("correct_streams", active=0),
    "matrix of streams transposed": {"predict_streams": transposed_matrix},
    "limit forgotten": wrong_arguments("clamped_gated", limit=1e9),
    "bound forgotten": wrong_arguments("bounded_gated", bound=1e9),
    "moe bound forgotten": wrong_args("moe", bound=None),
    "gate of the first head": {"scale_heads": lambda y, gate: PLAIN.scale_gate(y, gate[:, :1])},
    "first stream changed": {
        "add_to_streams": lambda x, delta: x + delta.repeat(1, x.shape[1] // 7)
    },
    "tokens added without spans": {"sum_chunks": summed_without_spans},
    "sums of earlier chunks forgotten": {"sum_chunks": summed_anew},
    "size of the sum": {"add_matched": lambda total, y, like: PLAIN.add_matched(total, y, total)},
    "moe limit forgotten": wrong_args("moe", clamp=None),
    "moe weighs results": wrong_args("moe", weighs_input=False),
    "copy reads what it wrote": {"copy_kv": copy_in_order},
    "sum in place": {"add": add_in_place},
    "write beyond the output": {"add": add_into_neighbour},
    "sum in low precision": {"add": sloppy_sum},
    "uninitialised output": {"add": lambda x, delta, scale=1.0: torch.empty_like(x)},
    "key of the choice not stored": changed_arguments("index_select", slots=nowhere),
    "scores below zero count": {"index_select": choice_by_signed_scores},
    "weights of the choice forgotten": changed_arguments("index_select", weights=torch.ones_like),
    "one token before the last forgotten": changed_arguments(
        "indexed_attend", chosen=lambda c: torch.cat((c[:, :1], c[:, :-1]), 1).where(c >= 0, c)
    ),
    "chosen tokens one too early": changed_arguments(
        "indexed_attend", chosen=lambda c: (c - 1).where(c > 0, c)
    ),
    "chosen keys without their rotated part": changed_arguments(
        "indexed_attend", q_rotated=torch.zeros_like
    ),
    "key of a block's choice not stored": changed_arguments("block_select", slots=nowhere),
    "last blocks are not ahead": wrong_arguments("block_select", local=0),
    "blocks that begin a token later": wrong_arguments("block_select", size=4),
    "choice of the next group": changed_arguments("block_attend", chosen=lambda c: c.roll(1, 1)),
    "values of blocks not stored": changed_arguments("block_attend", v=torch.zeros_like),
    "first of the chosen blocks forgotten": changed_arguments(
        "block_attend", chosen=lambda c: torch.cat((torch.full_like(c[..., :1], -1), c[..., 1:]), 2)
    ),
    "row of a token not stored": changed_arguments("recent_store", slots=nowhere),
    "first numbers rotated": {"recent_store": store_turned_from_the_start},
    "gates of entries without a bias": changed_fields("entry_select", "by", bias=torch.zeros_like),
    "biases of gates from the last": changed_fields("entry_select", "by", bias=lambda b: b.flip(0)),
    "entries rotated at their number": {"recent_attend": attend_entries_at_their_number},
    "keys of entries below zero count": changed_arguments("entry_select", q=torch.neg),
    "weights of a choice of entries forgotten": changed_arguments(
        "entry_select", weights=torch.ones_like
    ),
    "window one token too long": changed_arguments("recent_attend", window=lambda w: w + 1),
    "sinks of recent attention forgotten": changed_arguments(
        "recent_attend", sinks=lambda s: s - 1e9
    ),
    "chosen entries forgotten": wrong_arguments("recent_attend", chosen=None),
    "streams balanced once": changed_fields("collapse_streams", "w", rounds=lambda _: 1),
    "streams not normed": changed_fields("collapse_streams", "w", norm_eps=lambda _: 1e3),
    "matrix of hyper-connections transposed": {"expand_streams": expanded_by_rows},
    "softplus without a root": {"route_softplus": routed_by_softplus},
    "softplus bias forgotten": wrong_arguments("route_softplus", select_bias=None),
    "experts of ids by score": wrong_arguments("route_softplus", table=None),
    **planted(PLAIN),
}


PLANNED = {
    "pack_linear": "linear",
    "plan_attention": "attend",
    "plan_latent": "latent_attend",
    "plan_indexed": "index_select",
}


SMALL = [
    case
    for case in CASES + FP8_CASES + CODED_CASES
    if not case.is_bench and not case.name.startswith("long")
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug):
    functions = BUGS[bug]
    ops = PLAIN.replace(**functions)
    affected = set(functions) | {PLANNED[name] for name in functions if name in PLANNED}
    for case in SMALL:
        if case.op in affected and is_noticed(case, DTYPE, ops):
            return
    pytest.fail("no case noticed")


def is_noticed(case, dtype, ops):
    try:
        check(case, dtype, ops)
    except AssertionError:
        return True
    return False


def linear_added_up_in_its_dtype(x, w):
    total = torch.zeros(len(x), w.out_features, dtype=x.dtype)
    for i in range(w.in_features):
        total += x[:, i : i + 1] * w.weight[:, i]
    return total if w.bias is None else total + w.bias


def norm_with_squares_added_up_in_its_dtype(x, n):
    if n.kind != "rms":
        return PLAIN.norm(x, n)
    total = torch.zeros_like(x[..., :1])
    for i in range(x.shape[-1]):
        total += x[..., i : i + 1].square()
    return x * (total / x.shape[-1] + n.eps).rsqrt() * n.weight


def attend_with_scores_in_its_dtype(q, kv, plan, args):
    def product(a, b):
        return (a @ b).to(q.dtype).to(a.dtype)

    with mock.patch("quire.ops.attention._product", product):
        return PLAIN.attend(q, kv, plan, args)


BUGS_IN_16_BITS = {
    "linear": linear_added_up_in_its_dtype,
    "norm": norm_with_squares_added_up_in_its_dtype,
    "attend": attend_with_scores_in_its_dtype,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", BUGS_IN_16_BITS)
def test_what_must_be_float32_on_the_way_is(op, dtype):
    ops = PLAIN.replace(**{op: BUGS_IN_16_BITS[op]})
    assert any(is_noticed(case, dtype, ops) for case in SMALL if case.op == op)


BOUNDED = [name for name, contract in op_contracts.CONTRACTS.items() if contract.bounds]


@pytest.mark.parametrize("op", BOUNDED)
def test_ten_bits_less_are_noticed(op):
    """So that no bound is a thousand times what rounding takes."""

    def shortened(x):
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2.0**14).round() / 2.0**14, exponent)

    for case in SMALL:
        if case.op == op:
            results = results_of(case, DTYPE, PLAIN)
            floats = {name: shortened(x) for name, x in results.items() if x.is_floating_point()}
            try:
                check_error(case, DTYPE, results | floats)
            except AssertionError:
                return
    pytest.fail("no case noticed")


def test_rows_alone_are_compared_where_invariance_is_claimed():
    def other_rounding_in_a_batch(x, delta, scale=1.0):
        if len(x) == 1:
            return PLAIN.add(x, delta, scale)
        return (x.double() + scale * delta.double()).to(x.dtype)

    claims = {"batch_invariant": True, "invariance_reason": "claimed"}
    wrong = PLAIN.replace(add=other_rounding_in_a_batch, **claims)
    case = next(c for c in CASES if c.op == "add" and c.name.startswith("5x17-scale0.37"))
    check(case, DTYPE, PLAIN.replace(**claims))
    with pytest.raises(AssertionError, match="row alone"):
        check(case, DTYPE, wrong)


def test_the_single_calls_of_a_case_are_its_rows():
    for case in SMALL:
        prepared = case.prepare(ORACLE, case.draw(DTYPE))
        if prepared.singles:
            whole = case.run(ORACLE, prepared.arguments)
            alone = [case.run(ORACLE, single) for single in prepared.singles]
            if isinstance(whole, tuple):
                whole, alone = whole[0], [result[0] for result in alone]
            exact = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": f"{case.op}/{case.name}"}
            torch.testing.assert_close(torch.cat(alone), whole, **exact)


def test_fence_poisons_new_memory():
    with Fenced() as fence:
        assert torch.empty(3).isnan().all()
        assert torch.zeros(2).new_empty(2, 2).isnan().all()
    fence.check()
