"""Cases of the ops of several residual streams, and of gates in other forms."""

from __future__ import annotations

from quire.ops.catalog import Ops
from quire.ops.mixers.streams import HyperWeights
from tests.support.op_cases.case import Case, Draw, Prepared, by_row

WIDTH = 7


def _join(rows: int, other: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"x": draw.strided(rows, WIDTH), "other": draw.normal(rows, other)}
        return by_row("join_streams", arguments)

    return Case("join_streams", f"{rows}-{other}", prepare)


def _enter(rows: int, count: int, scale: float = 1.0) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        others = draw.normal(rows, (count - 1) * WIDTH, scale=scale)
        return by_row("enter_streams", {"x": draw.normal(rows, WIDTH), "others": others})

    return Case("enter_streams", f"{rows}-{count}-scale{scale:g}", prepare)


def _predict(rows: int, count: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "x": draw.normal(rows, count * WIDTH),
            "routed": draw.normal(rows, count),
            "weight": draw.normal(count * count, count),
        }
        return by_row("predict_streams", arguments)

    return Case("predict_streams", f"{rows}-{count}", prepare)


def _correct(rows: int, count: int, active: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "x": draw.normal(rows, count * WIDTH),
            "activated": draw.strided(rows, WIDTH),
            "routed": draw.normal(rows, count),
            "weight": draw.normal(count, count),
            "active": active,
        }
        return by_row("correct_streams", arguments)

    return Case("correct_streams", f"{rows}-{count}-active{active}", prepare)


def _add(rows: int, count: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"x": draw.normal(rows, count * WIDTH), "delta": draw.normal(rows, WIDTH)}
        return by_row("add_to_streams", arguments)

    return Case("add_to_streams", f"{rows}-{count}", prepare)


def _matched(rows: int, scale: float = 1.0) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "total": draw.strided(rows, WIDTH),
            "y": draw.normal(rows, WIDTH, scale=scale),
            "like": draw.strided(rows, WIDTH),
        }
        return by_row("add_matched", arguments)

    return Case("add_matched", f"{rows}-scale{scale:g}", prepare)


def _sparse(rows: int, act: str, deviations: float) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"gate_up": draw.normal(rows, 18), "act": act, "deviations": deviations}
        return by_row("sparse_gated", arguments)

    return Case("sparse_gated", f"{rows}-{act}-{deviations:g}", prepare)


def _bounded(rows: int, act: str, bound: float) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"gate_up": draw.normal(rows, 18), "act": act, "bound": bound}
        return by_row("bounded_gated", arguments)

    return Case("bounded_gated", f"{rows}-{act}-{bound:g}", prepare)


def _clamped(rows: int, limit: float) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        return by_row("clamped_gated", {"gate_up": draw.normal(rows, 18), "limit": limit})

    return Case("clamped_gated", f"{rows}-{limit:g}", prepare)


def _heads(rows: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"y": draw.strided(rows, 12), "gate": draw.normal(rows, 3)}
        return by_row("scale_heads", arguments)

    return Case("scale_heads", str(rows), prepare)


def _hyper(draw: Draw, count: int, numbers: int) -> HyperWeights:
    width = count * WIDTH
    return HyperWeights(
        weight=draw.wide(draw.rng.standard_normal((numbers, width)) * 0.4),
        base=draw.wide(draw.rng.standard_normal(numbers)),
        scale=draw.wide(1 + 0.3 * draw.rng.standard_normal(numbers)),
        norm_eps=0.05,
        eps=0.02,
        rounds=3,
    )


def _collapse(rows: int, count: int, *, is_last: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        numbers = count if is_last else 2 * count + count * count
        x = draw.strided(rows, count * WIDTH)
        arguments = {"x": x, "w": _hyper(draw, count, numbers), "count": count}
        return by_row("collapse_streams", arguments)

    return Case("collapse_streams", f"{rows}-{count}{'-last' * is_last}", prepare)


def _expand(rows: int, count: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        mix = draw.rng.standard_normal((rows, count + count * count))
        arguments = {
            "x": draw.strided(rows, count * WIDTH),
            "delta": draw.strided(rows, WIDTH),
            "mix": draw.wide(mix),
        }
        return by_row("expand_streams", arguments)

    return Case("expand_streams", f"{rows}-{count}", prepare)


CASES = (
    *(_join(rows, other) for rows, other in ((0, WIDTH), (1, 3), (5, WIDTH))),
    *(_enter(rows, 3) for rows in (0, 1, 5)),
    _enter(4, 2, scale=1e-3),
    *(_predict(rows, 3) for rows in (0, 1, 5)),
    *(_correct(rows, 3, active) for rows, active in ((0, 0), (1, 2), (5, 0), (5, 1))),
    *(_add(rows, count) for rows, count in ((0, 2), (1, 3), (5, 4))),
    *(_matched(rows) for rows in (0, 1, 5)),
    _matched(4, scale=1e-3),
    *(_sparse(rows, "gelu_tanh", 0.4) for rows in (0, 1, 5)),
    _sparse(5, "silu", -0.3),
    *(_bounded(rows, "silu", 0.3) for rows in (0, 1, 5)),
    *(_clamped(rows, 0.3) for rows in (0, 1, 5)),
    *map(_heads, (0, 1, 5)),
    *(_collapse(rows, 3) for rows in (0, 1, 5)),
    _collapse(4, 2, is_last=True),
    *(_expand(rows, count) for rows, count in ((0, 3), (1, 3), (5, 2))),
)
