"""Cases of attention within whole prompts: ragged, strided as parts of a fused projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.ops import RelativeScores
from quire.ops.catalog import Ops
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared


@dataclass(frozen=True)
class Heads:
    """Heads H and K, head dim D."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8


def _attend(
    name: str,
    lengths: Sequence[int],
    h: Heads = Heads(),  # noqa: B008  (frozen)
    *,
    window: int | None = None,
    is_fused: bool = True,
    mean: float = 0.0,
    is_bench: bool = False,
) -> Case:
    starts = np.cumsum([0, *lengths], dtype=np.int32)

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        counts = (h.heads, h.kv_heads, h.kv_heads)
        if is_fused:
            fused = draw.normal(int(starts[-1]), sum(counts), h.head_dim, scale=1.5, mean=mean)
            q, k, v = fused.split(counts, 1)
        else:
            q, k, v = (draw.strided(int(starts[-1]), n, h.head_dim, scale=1.5) for n in counts)

        def arguments(first: int, stop: int) -> Arguments:
            begin, end = int(starts[first]), int(starts[stop])
            plan = ops.plan_prompts(
                query_start=starts[first : stop + 1] - begin,
                seq_lens=np.diff(starts[first : stop + 1]),
            )
            parts = {"q": q[begin:end], "k": k[begin:end], "v": v[begin:end]}
            return {**parts, "plan": plan, "scale": 0.6, "window": window}

        count = len(lengths)
        singles = () if is_bench else tuple(arguments(i, i + 1) for i in range(count))
        return Prepared(arguments(0, count), singles)

    return Case("attend_prompts", name, prepare, is_bench=is_bench)


@dataclass(frozen=True)
class Distances:
    """Columns W and farthest distance R, and what there is a table of."""

    columns: int = 6
    reach: int = 4
    parts: tuple[str, ...] = ("bias", "keys", "queries")


def _relative(
    name: str,
    lengths: Sequence[int],
    h: Heads = Heads(),  # noqa: B008  (frozen)
    d: Distances = Distances(),  # noqa: B008  (frozen)
    **options: Any,
) -> Case:
    plain = _attend(name, lengths, h, **options)

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        found = plain.prepare(ops, draw)
        columns = draw.integers(draw.rng.integers(0, d.columns, 2 * d.reach + 1))
        tables: dict[str, Any] = {}
        if "bias" in d.parts:
            tables["bias"] = draw.wide(draw.rng.standard_normal((h.heads, d.columns)) * 2)
        for part in ("keys", "queries"):
            if part in d.parts:
                tables[part] = draw.normal(h.heads, d.columns, h.head_dim, scale=0.7)
        relative = RelativeScores(columns, **tables)
        return Prepared(
            {**found.arguments, "relative": relative},
            tuple({**single, "relative": relative} for single in found.singles),
        )

    return Case("attend_relative", name, prepare, is_bench=plain.is_bench)


RAGGED = (3, 1, 17, 2, 40, 1, 5)
LONG = (300, 129, 7)
WINDOWS: tuple[dict[str, Any], ...] = tuple({"window": w} for w in (None, 1, 2, 16, 200))
MINILM, BERT = Heads(12, 12, 32), Heads(12, 12, 64)


def _relative_cases() -> list[Case]:
    parts = {"bias": ("bias",), "keys": ("keys",), "queries": ("queries",), "all": Distances.parts}
    mpnet = Distances(32, 128, ("bias",))
    deberta = Distances(512, 512, ("keys", "queries"))
    return [
        _relative("no_tokens", ()),
        _relative("empty_row", (4, 0, 3)),
        *(_relative(f"ragged-{n}", RAGGED, d=Distances(parts=p)) for n, p in parts.items()),
        _relative("ragged-window", RAGGED, Heads(3, 1, 5), is_fused=False, window=3),
        _relative("long", LONG, Heads(2, 2, 16), Distances(7, 150)),
        _relative("near", (140,), Heads(1, 1, 8), Distances(5, 200)),
        _relative("mpnet_8x512", (512,) * 8, BERT, mpnet, is_bench=True),
        _relative("deberta_8x512", (512,) * 8, BERT, deberta, is_bench=True),
    ]


def _cases() -> list[Case]:
    cases = [_attend("no_tokens", ()), _attend("empty_row", (4, 0, 3))]
    for options in WINDOWS:
        window = options["window"]
        cases += [
            _attend(f"ragged-{window}", RAGGED, **options),
            _attend(f"ragged-odd-{window}", RAGGED, Heads(3, 1, 5), is_fused=False, **options),
            _attend(f"long-{window}", LONG, Heads(2, 2, 16), **options),
        ]
    return [
        *cases,
        *_relative_cases(),
        _attend("one", (1,)),
        _attend("segments", (128, 256, 127), Heads(2, 1, 32)),
        _attend("far", (140,), Heads(1, 1, 8), mean=30.0),
        _attend("minilm_512x32", (32,) * 512, MINILM, is_bench=True),
        _attend("minilm_32x128", (128,) * 32, MINILM, is_bench=True),
        _attend("minilm_8x512", (512,) * 8, MINILM, is_bench=True),
        _attend("bert_4x512", (512,) * 4, BERT, is_bench=True),
        _attend("local_8192", (8192,), BERT, window=65, is_bench=True),
    ]


CASES = tuple(_cases())
