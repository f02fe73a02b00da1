"""Cases of the ops that multiply with weights: projections, feed-forward, logits, experts."""

from __future__ import annotations

import numpy as np

from quire.ops.activation import ACTIVATIONS
from quire.ops.catalog import Ops
from quire.ops.linear import LinearWeight
from quire.ops.moe import MoeArgs
from quire.ops.routing import RouteArgs
from quire.ops.segments import Addend
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared, by_row


def _weight(
    ops: Ops,
    draw: Draw,
    out: int,
    width: int,
    *,
    bias: bool,
    segments: int = 1,
    gated: bool = False,
) -> LinearWeight:
    weight = draw.normal(out, width, scale=width**-0.5)
    packed: LinearWeight = ops.pack_linear(
        weight, draw.normal(out) if bias else None, segments=segments, gated=gated
    )
    return packed


def addend_of(draw: Draw, rows: int, width: int) -> Addend:
    """An addend of every third row from the second on: that of the last row, or the first."""
    which = [row % 2 if row % 3 == 1 else -1 for row in range(rows)]
    values = draw.wide(draw.rng.standard_normal((2, width)))
    return Addend(values, draw.exact(np.array(which, dtype=np.int32)))


def _x(draw: Draw, rows: int, width: int, is_strided: bool) -> object:
    return (draw.strided if is_strided else draw.normal)(rows, width)


def _linear(
    rows: int,
    width: int,
    out: int,
    *,
    bias: bool = False,
    is_strided: bool = False,
    addend: bool = False,
    segments: int = 1,
    bench: str = "",
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        arguments: Arguments = {
            "x": _x(draw, rows, width, is_strided),
            "w": _weight(ops, draw, out, width, bias=bias, segments=segments),
        }
        if addend:
            return with_addend(arguments, addend_of(draw, rows, out))
        return Prepared(arguments) if bench else by_row("linear", arguments)

    traits = f"{'-bias' * bias}{'-strided' * is_strided}{'-addend' * addend}"
    name = f"{rows}x{width}x{out}{traits}{f'-{segments}segments' * (segments > 1)}"
    return Case("linear", bench or name, prepare, is_bench=bool(bench))


def with_addend(arguments: Arguments, addend: Addend) -> Prepared:
    """Single rows have an addend of their own, or none."""
    single = by_row("linear", arguments).singles
    rows = [Addend(addend.values, addend.rows[t : t + 1]) for t in range(len(addend.rows))]
    of_rows = [row if int(row.rows) >= 0 else None for row in rows]
    return Prepared(
        {**arguments, "addend": addend},
        tuple({**one, "addend": row} for one, row in zip(single, of_rows, strict=True)),
    )


def _embed(rows: int, width: int, out: int, *, scale: float = 1.0, bias: bool = False) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        arguments = {
            "ids": draw.integers(draw.rng.integers(0, out, rows)),
            "w": _weight(ops, draw, out, width, bias=bias),
            "scale": scale,
        }
        return by_row("embed_packed", arguments)

    return Case("embed_packed", f"{rows}x{width}x{out}{'-bias' * bias}-scale{scale:g}", prepare)


def _hidden(
    rows: int,
    width: int,
    ffn: int,
    act: str,
    gated: bool,
    *,
    bias: bool = False,
    has_nan: bool = False,
    addend: bool = False,
    bench: str = "",
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        out = ffn * (2 if gated else 1)
        arguments: Arguments = {
            "x": (draw.with_nan if has_nan else draw.normal)(rows, width),
            "up": _weight(ops, draw, out, width, bias=bias, gated=gated),
            "act": act,
            "gated": gated,
        }
        if addend:
            return with_addend(arguments, addend_of(draw, rows, out))
        return Prepared(arguments) if bench else by_row("hidden", arguments)

    traits = "-gated" * gated + "-bias" * bias + "-nan" * has_nan + "-addend" * addend
    name = f"{act}{traits}-{rows}x{width}x{ffn}"
    return Case("hidden", bench or name, prepare, is_bench=bool(bench))


def _logits(
    rows: int, vocab: int, scale: float, softcap: float | None, width: int = 16, bench: str = ""
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        arguments = {
            "x": draw.normal(rows, width),
            "head": _weight(ops, draw, vocab, width, bias=False),
            "scale": scale,
            "softcap": softcap,
        }
        return Prepared(arguments) if bench else by_row("logits", arguments)

    name = f"{rows}x{vocab}-scale{scale:g}-softcap{softcap}"
    return Case("logits", bench or name, prepare, is_bench=bool(bench))


def _route(
    name: str,
    rows: int,
    experts: int,
    args: RouteArgs,
    *,
    select_bias: bool = False,
    expert_scales: bool = False,
) -> Case:
    """Logits that are far apart: rounding never changes the choice."""

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        ranks = np.arange(experts)
        logits = [draw.rng.permutation(ranks) * 0.5 - experts / 4 for _ in range(rows)]
        if rows > experts * 4:  # many different ones
            logits = [row + 0.1 * draw.rng.random(experts) for row in logits]
        return by_row(
            "route",
            {
                "logits": draw.of(np.reshape(logits, (rows, experts))),
                "args": args,
                "select_bias": draw.wide(draw.rng.permutation(ranks) * 0.07)
                if select_bias
                else None,
                "expert_scales": draw.wide(draw.rng.random(experts)) if expert_scales else None,
            },
        )

    return Case("route", name, prepare)


def _route_softplus(
    name: str, rows: int, *, select_bias: bool = False, by_id: bool = False
) -> Case:
    """Logits that are far apart."""
    experts, top_k, vocab = 6, 2, 5

    def prepare(_: Ops, draw: Draw) -> Prepared:
        ranks = np.arange(experts)
        logits = [draw.rng.permutation(ranks) * 0.9 - experts / 2 for _ in range(rows)]
        arguments: Arguments = {
            "logits": draw.of(np.reshape(logits, (rows, experts))),
            "top_k": top_k,
            "scale": 1.7,
            "select_bias": draw.wide(draw.rng.permutation(ranks) * 0.3) if select_bias else None,
        }
        if by_id:
            table = [draw.rng.permutation(experts)[:top_k] for _ in range(vocab)]
            arguments["table"] = draw.exact(np.array(table, dtype=np.int32))
            arguments["ids"] = draw.integers(draw.rng.integers(0, vocab, rows))
        return by_row("route_softplus", arguments)

    return Case("route_softplus", f"{name}-{rows}", prepare)


def _routes() -> list[Case]:
    mixtral = RouteArgs(2, "softmax", renorm=True)
    deepseek = RouteArgs(3, "sigmoid", True, scale=2.5, groups=4, top_groups=2)
    best = RouteArgs(3, "sigmoid", False, groups=4, top_groups=2, group_best=1)
    ernie = RouteArgs(2, "softmax", True, renorm_min=0.6)
    return [
        *(_route(f"softmax-{rows}", rows, 4, mixtral) for rows in (0, 1, 9)),
        _route("softmax-not_renormalised-scaled", 6, 5, RouteArgs(2, "softmax", False, scale=1.7)),
        _route("softmax-expert_scales", 7, 6, mixtral, expert_scales=True),
        _route("all_experts", 4, 3, RouteArgs(3, "softmax", False)),
        _route("one_expert-renormalised", 4, 3, RouteArgs(1, "softmax", True)),
        _route("sigmoid-groups-select_bias", 7, 8, deepseek, select_bias=True),
        _route("sigmoid-groups-best", 9, 12, best),
        _route("sigmoid-renorm_eps", 5, 6, RouteArgs(2, "sigmoid", True, renorm_eps=0.3)),
        _route("softmax-renorm_min-select_bias", 7, 6, ernie, select_bias=True),
        _route("softmax_topk", 7, 6, RouteArgs(3, "softmax_topk", renorm=False)),
        _route("sigmoid_topk", 7, 6, RouteArgs(1, "sigmoid_topk", renorm=False)),
        _route("sigmoid-many", 39, 7, RouteArgs(2, "sigmoid", False)),
        _route("sigmoid_topk-many", 39, 7, RouteArgs(1, "sigmoid_topk", renorm=False)),
        *(_route_softplus("plain", rows) for rows in (0, 1, 9)),
        _route_softplus("select_bias", 7, select_bias=True),
        _route_softplus("by_id", 7, by_id=True),
        _route("sparsemixer", 9, 6, RouteArgs(2, "sparsemixer", False, jitter=0.4)),
    ]


def _moe(
    name: str,
    rows: int,
    top_k: int,
    experts: int,
    args: MoeArgs,
    *,
    bias: bool = False,
    has_nan: bool = False,
    bench: tuple[int, int] | None = None,
) -> Case:
    """has_nan: one in the biases of one expert. bench: inputs of the layer and of an expert."""

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        width, ffn = bench or (experts + 5, 7)
        inner = ffn * (2 if args.gated else 1)
        chosen = [draw.rng.permutation(experts)[:top_k] for _ in range(rows)]
        arguments: Arguments = {
            "x": draw.normal(rows, width),
            "chosen": draw.exact(np.reshape(chosen, (rows, top_k)).astype(np.int32)),
            "weights": draw.wide(draw.rng.random((rows, top_k)) * 1.7),
            "experts": ops.pack_experts(
                draw.normal(experts, inner, width, scale=width**-0.5),
                draw.normal(experts, width, ffn, scale=ffn**-0.5),
                (draw.with_nan if has_nan else draw.normal)(experts, inner) if bias else None,
                draw.normal(experts, width) if bias else None,
                gated=args.gated,
            ),
            "args": args,
        }
        if bench:
            return Prepared(arguments)
        return by_row("moe", arguments)

    return Case("moe", name, prepare, is_bench=bench is not None)


def _moes() -> list[Case]:
    silu, gpt_oss = MoeArgs(), MoeArgs(clamp=0.6)
    return [
        *(_moe(f"silu-{rows}", rows, 2, 4, silu) for rows in (0, 1, 9)),
        _moe("all_experts-gelu_tanh", 4, 3, 3, MoeArgs("gelu_tanh")),
        _moe("one_expert", 4, 1, 3, silu),
        _moe("many_experts", 7, 3, 40, silu),
        _moe("not_gated-relu2", 5, 2, 4, MoeArgs("relu2", gated=False), bias=True),
        _moe("weighs_input", 6, 1, 4, MoeArgs(weighs_input=True)),
        _moe("weighs_input-several", 5, 3, 4, MoeArgs(weighs_input=True), bias=True),
        _moe("bound", 7, 3, 6, MoeArgs(bound=0.4), bias=True),
        _moe("clamp-bias", 7, 3, 6, gpt_oss, bias=True),
        _moe("clamp-nan", 7, 3, 6, gpt_oss, bias=True, has_nan=True),
    ]


CASES = (
    *(_embed(rows, 17, 70) for rows in (0, 1, 6)),
    _embed(5, 16, 33, scale=3.3, bias=True),
    *(_linear(rows, 16, 24) for rows in (0, 1, 2, 5)),
    _linear(7, 33, 19, bias=True, is_strided=True),
    _linear(70, 130, 3),
    *(_linear(rows, 24, 40, addend=True, bias=rows > 4) for rows in (0, 1, 2, 7)),
    *(_linear(5, width, 9, segments=n, bias=True) for n in (2, 4) for width in (16, 560)),
    *(_hidden(3, 12, 10, act, gated) for act in ACTIVATIONS for gated in (True, False)),
    *(_hidden(rows, 17, 9, "silu", True, bias=True) for rows in (0, 1, 6)),
    _hidden(3, 17, 9, "relu2", False, has_nan=True),
    *(_hidden(6, 17, 40, "silu", gated, bias=True, addend=True) for gated in (True, False)),
    *(_logits(rows, 37, 1.0, None) for rows in (0, 1, 4)),
    _logits(3, 37, 0.25, None),
    _logits(3, 37, 1.5, 0.8),
    *_routes(),
    *_moes(),
    *(_moe(f"experts_2b_{n}", n, 4, 32, MoeArgs(), bench=(1024, 768)) for n in (1, 8, 512)),
    _linear(1, 1024, 4096, bench="qkv_0.6b_1"),
    _linear(32, 1024, 4096, bench="qkv_0.6b_32"),
    _linear(512, 1024, 4096, bench="qkv_0.6b_512"),
    _hidden(1, 1024, 3072, "silu", True, bench="hidden_0.6b_1"),
    _linear(1, 3072, 1024, segments=4, bench="down_0.6b_1"),
    _hidden(32, 1024, 3072, "silu", True, bench="hidden_0.6b_32"),
    _linear(32, 3072, 1024, segments=4, bench="down_0.6b_32"),
    _hidden(512, 1024, 3072, "silu", True, bench="hidden_0.6b_512"),
    _linear(512, 3072, 1024, segments=4, bench="down_0.6b_512"),
    _logits(1, 151_936, 1.0, None, 1024, bench="logits_0.6b_1"),
    _logits(32, 151_936, 1.0, None, 1024, bench="logits_0.6b_32"),
)
