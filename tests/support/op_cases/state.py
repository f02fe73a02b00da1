"""Cases of the ops of layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.ops import NO_BLOCK
from quire.ops.catalog import Ops
from quire.ops.norm import NormWeight
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared
from tests.support.op_cases.rows import EPS

Rows = tuple[tuple[int, int], ...]
"""Of each row: its tokens, and after how many of the last ones the state is kept."""

NO_ROWS: Rows = ()
ONE: Rows = ((1, 1),)
PAIR: Rows = ((3, 2), (1, 1))
DECODES: Rows = ((1, 1), (1, 0), (1, 1))
CROWD: Rows = ((5, 1), (1, 1), (7, 3), (2, 0), (4, 4))


@dataclass(frozen=True)
class Step:
    """Where the rows of a step have their states among `num_blocks` blocks in shuffled order."""

    reads: np.ndarray
    writes: np.ndarray
    starts: list[int]
    num_blocks: int

    @staticmethod
    def of(rows: Rows, rng: np.random.Generator) -> Step:
        num_blocks = 2 + sum(1 + kept for _, kept in rows)
        free = rng.permutation(num_blocks).tolist()
        reads, writes = [], []
        for length, kept in rows:
            reads += [free.pop()] + [NO_BLOCK] * (length - 1)
            writes += [NO_BLOCK] * (length - kept) + [free.pop() for _ in range(kept)]
        starts = np.cumsum([0] + [length for length, _ in rows]).tolist()
        integers = (np.array(values, dtype=np.int64) for values in (reads, writes))
        return Step(*integers, starts, num_blocks)

    def states(self, draw: Draw, *shape: int, is_wide: bool = True) -> Tensor:
        """Random states in the blocks that are read, NaN in the others; blocks lie apart."""
        size = int(np.prod(shape))
        values = np.full((self.num_blocks, size + 5), np.nan)
        for block in self.reads[self.reads >= 0]:
            values[block, :size] = draw.rng.standard_normal(size)
        drawn = (draw.wide if is_wide else draw.of)(values)
        return drawn[:, :size].unflatten(1, shape)

    def prepared(self, arguments: Arguments, per_token: tuple[str, ...]) -> Prepared:
        """One call for each row by itself."""
        names = (*per_token, "reads", "writes")
        singles = [
            arguments | {n: arguments[n][first:stop] for n in names if arguments[n] is not None}
            for first, stop in zip(self.starts, self.starts[1:], strict=False)
        ]
        return Prepared(arguments, tuple(singles))


def _named(op: str, rows: Rows, *traits: object) -> str:
    lengths = ",".join(str(length) for length, _ in rows) or "0"
    return "-".join([lengths, *(str(trait) for trait in traits if trait)])


def _conv(
    rows: Rows, width: int, kernel: int, *, bias: bool = False, silu: bool = False,
    gates: bool = False, is_bench: bool = False,
) -> Case:  # fmt: skip
    def prepare(_: Ops, draw: Draw) -> Prepared:
        step = Step.of(rows, draw.rng)
        count = len(step.reads)
        arguments: Arguments = {
            "x": draw.strided(count, width),
            "states": step.states(draw, kernel - 1, width, is_wide=False),
            "reads": draw.integers(step.reads),
            "writes": draw.integers(step.writes),
            "weight": draw.normal(kernel, width),
            "bias": draw.normal(width) if bias else None,
            "act": "silu" if silu else None,
            "before": draw.strided(count, width) if gates else None,
            "after": draw.strided(count, width) if gates else None,
        }
        return step.prepared(arguments, ("x", "before", "after"))

    traits = (f"{width}x{kernel}", bias * "bias", silu * "silu", gates * "gates")
    return Case("short_conv", _named("short_conv", rows, *traits), prepare, is_bench)


def _mamba(
    rows: Rows, width: int, size: int, *, gate: bool = True, scale: float = 1.0,
    is_bench: bool = False,
) -> Case:  # fmt: skip
    def prepare(_: Ops, draw: Draw) -> Prepared:
        step = Step.of(rows, draw.rng)
        count = len(step.reads)
        arguments: Arguments = {
            "x": draw.strided(count, width),
            "dt": draw.normal(count, width, scale=scale),
            "b": draw.strided(count, size),
            "c": draw.strided(count, size),
            "states": step.states(draw, size, width),
            "reads": draw.integers(step.reads),
            "writes": draw.integers(step.writes),
            "decay": draw.wide(-np.exp(draw.rng.standard_normal((size, width)))),
            "skip": draw.wide(draw.rng.standard_normal(width)),
            "gate": draw.strided(count, width) if gate else None,
        }
        return step.prepared(arguments, ("x", "dt", "b", "c", "gate"))

    traits = (f"{width}x{size}", gate * "gate", (scale != 1.0) * f"dt{scale:g}")
    return Case("mamba_scan", _named("mamba_scan", rows, *traits), prepare, is_bench)


def _mamba2(
    rows: Rows, heads: int, dim: int, size: int, groups: int, *,
    limits: tuple[float, float] = (0.0, float("inf")), is_bench: bool = False,
) -> Case:  # fmt: skip
    def prepare(_: Ops, draw: Draw) -> Prepared:
        step = Step.of(rows, draw.rng)
        count = len(step.reads)
        arguments: Arguments = {
            "x": draw.strided(count, heads * dim),
            "dt": draw.strided(count, heads),
            "b": draw.strided(count, groups * size),
            "c": draw.strided(count, groups * size),
            "states": step.states(draw, heads, size, dim),
            "reads": draw.integers(step.reads),
            "writes": draw.integers(step.writes),
            "decay": draw.wide(-np.exp(draw.rng.standard_normal(heads))),
            "skip": draw.wide(draw.rng.standard_normal(heads)),
            "dt_bias": draw.wide(draw.rng.standard_normal(heads)),
            "dt_limits": limits,
        }
        return step.prepared(arguments, ("x", "dt", "b", "c"))

    name = _named("mamba2_scan", rows, f"{heads}x{dim}x{size}", f"{groups}groups", limits[0])
    return Case("mamba2_scan", name, prepare, is_bench)


def _delta(
    rows: Rows, heads: int, key_heads: int, dim: int, size: int, *, is_bench: bool = False
) -> Case:
    name = _named("gated_delta", rows, f"{heads}of{key_heads}", f"{dim}x{size}")
    prepare = _delta_rule(rows, heads, key_heads, dim, size, heads)
    return Case("gated_delta", name, prepare, is_bench)


def _channel_delta(
    rows: Rows,
    heads: int,
    key_heads: int,
    dim: int,
    size: int,
    *,
    by_head: bool = False,
    **facts: float,
) -> Case:
    words = (*facts, "by_head" if by_head else "by_channel")
    name = _named("channel_delta", rows, f"{heads}of{key_heads}", f"{dim}x{size}", *words)
    steps = heads if by_head else heads * size
    prepare = _delta_rule(rows, heads, key_heads, dim, size, steps, **facts)
    return Case("channel_delta", name, prepare)


def _delta_rule(
    rows: Rows, heads: int, key_heads: int, dim: int, size: int, steps: int, **facts: float
) -> Callable[[Ops, Draw], Prepared]:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        step = Step.of(rows, draw.rng)
        count = len(step.reads)
        arguments: Arguments = {
            "q": draw.strided(count, key_heads * size),
            "k": draw.strided(count, key_heads * size),
            "v": draw.strided(count, heads * dim),
            "a": draw.strided(count, steps),
            "b": draw.strided(count, heads),
            "states": step.states(draw, heads, size, dim),
            "reads": draw.integers(step.reads),
            "writes": draw.integers(step.writes),
            "decay": draw.wide(-np.exp(draw.rng.standard_normal(heads))),
            "dt_bias": draw.wide(draw.rng.standard_normal(steps)),
            **facts,
        }
        return step.prepared(arguments, ("q", "k", "v", "a", "b"))

    return prepare


def _gated_linear(rows: Rows, width: int, blocks: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        step = Step.of(rows, draw.rng)
        count = len(step.reads)
        arguments: Arguments = {
            "x": draw.strided(count, width),
            "gates": draw.normal(count, blocks, 2 * width // blocks),
            "states": step.states(draw, width),
            "reads": draw.integers(step.reads),
            "writes": draw.integers(step.writes),
            "positions": draw.integers(draw.rng.integers(0, 2, (1, count))),
            "rate": draw.wide(-8 * np.exp(draw.rng.standard_normal(width) - 2)),
            "bias": draw.wide(draw.rng.standard_normal((2, width))),
        }
        prepared = step.prepared(arguments, ("x", "gates"))
        starts = np.cumsum([0, *(length for length, _ in rows)])
        singles = tuple(
            single | {"positions": arguments["positions"][:, first:stop]}
            for single, first, stop in zip(
                prepared.singles, starts[:-1].tolist(), starts[1:].tolist(), strict=True
            )
        )
        return Prepared(arguments, singles)

    return Case("gated_linear", _named("gated_linear", rows, f"{width}of{blocks}"), prepare)


def _gated_norm(
    count: int, width: int, group: int, *, gate_first: bool, weight: int | None
) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        y, gate = draw.strided(count, width), draw.strided(count, width)
        n = None if weight is None else NormWeight("rms", EPS, draw.normal(weight, mean=0.5))
        arguments: Arguments = {
            "y": y, "gate": gate, "n": n, "group": group, "gate_first": gate_first
        }  # fmt: skip
        singles = [arguments | {"y": y[i : i + 1], "gate": gate[i : i + 1]} for i in range(count)]
        return Prepared(arguments, tuple(singles))

    order = "gate_first" if gate_first else "norm_first"
    return Case("gated_norm", f"{count}x{width}of{group}-{order}-weight{weight}", prepare)


PROMPT: Rows = ((64, 1),)
BATCH: Rows = ((1, 1),) * 8

CASES = (
    *(_conv(rows, 17, 4, bias=True, silu=True) for rows in (NO_ROWS, ONE, DECODES, CROWD)),
    _conv(CROWD, 300, 2),
    _conv(CROWD, 40, 3, gates=True),
    _conv(PROMPT, 8192, 4, silu=True, is_bench=True),
    *(_mamba(rows, 19, 5) for rows in (NO_ROWS, ONE, DECODES, CROWD)),
    _mamba(CROWD, 300, 3, gate=False),
    _mamba(CROWD, 16, 16, scale=30.0),
    _mamba(BATCH, 5120, 16, is_bench=True),
    *(_mamba2(rows, 4, 10, 6, 2) for rows in (NO_ROWS, ONE, DECODES, CROWD)),
    _mamba2(CROWD, 3, 40, 5, 1, limits=(0.4, 1.1)),
    _mamba2(PAIR, 2, 10, 6, 1),
    _mamba2(PAIR, 2, 130, 70, 1),
    _mamba2(BATCH, 32, 64, 128, 1, is_bench=True),
    *(_delta(rows, 4, 2, 10, 6) for rows in (NO_ROWS, ONE, DECODES, CROWD)),
    _delta(CROWD, 3, 3, 40, 19),
    _delta(PAIR, 2, 1, 130, 70),
    _delta(PAIR, 2, 1, 10, 6),
    _delta(BATCH, 32, 16, 128, 128, is_bench=True),
    _delta(PROMPT, 16, 16, 128, 128, is_bench=True),
    *(_channel_delta(rows, 4, 4, 10, 6) for rows in (NO_ROWS, ONE, DECODES, CROWD)),
    _channel_delta(CROWD, 4, 2, 10, 6, by_head=True, strength=2.0),
    _channel_delta(CROWD, 3, 3, 40, 19, bound=-0.7),
    _channel_delta(PAIR, 2, 1, 10, 6, by_head=True, bound=-1.3, strength=1.7),
    *(_gated_linear(rows, 20, 5) for rows in (NO_ROWS, ONE, DECODES, CROWD)),
    _gated_linear(CROWD, 66, 2),
    *(_gated_norm(n, 24, 24, gate_first=True, weight=24) for n in (0, 1, 4)),
    _gated_norm(4, 40, 10, gate_first=True, weight=40),
    _gated_norm(4, 40, 10, gate_first=False, weight=40),
    _gated_norm(5, 51, 17, gate_first=False, weight=17),
    _gated_norm(4, 33, 33, gate_first=True, weight=None),
)
