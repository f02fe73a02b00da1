"""Cases of attention within whole prompts: ragged, strided as parts of a fused projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.ops.select import Ops
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


RAGGED = (3, 1, 17, 2, 40, 1, 5)
LONG = (300, 129, 7)
WINDOWS: tuple[dict[str, Any], ...] = tuple({"window": w} for w in (None, 1, 2, 16, 200))
MINILM, BERT = Heads(12, 12, 32), Heads(12, 12, 64)


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
