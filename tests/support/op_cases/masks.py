"""Cases of the masks of grammars."""

from __future__ import annotations

import numpy as np

from quire.ops.catalog import Ops
from tests.support.op_cases.case import Case, Draw, Prepared

VOCAB = 151_936
"""Of a real model: what benchmarks take."""


def _words(draw: Draw, count: int, width: int, kind: str) -> np.ndarray:
    """Few tokens allowed, most, or half of them; the bits beyond V are all set."""
    share = {"few": 0.01, "most": 0.99, "half": 0.5, "none": 0.0, "all": 1.0}[kind]
    bits = np.ones((count, -(-width // 32) * 32), dtype=np.uint8)
    bits[:, :width] = draw.rng.random((count, width)) < share
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _mask(rows: int, width: int, chosen: list[int], kind: str, *, is_bench: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        words = _words(draw, len(chosen), width, kind)
        return Prepared(
            {
                "logits": draw.wide(draw.rng.standard_normal((rows, width))),
                "rows": draw.integers(np.array(chosen, dtype=np.int64)),
                "mask": draw.exact(words),
            }
        )

    name = f"{len(chosen)}of{rows}x{width}-{kind}"
    return Case("mask_logits", name, prepare, is_bench=is_bench)


CASES = (
    *(_mask(3, width, [2, 0], "half") for width in (1, 31, 32, 33, 95, 1000)),
    *(_mask(2, 67, [1], kind) for kind in ("few", "most", "none", "all")),
    _mask(2, 40, [], "half"),
    _mask(1, 20_000, [0], "few"),
    *(_mask(32, VOCAB, list(range(32)), kind, is_bench=True) for kind in ("few", "most")),
)
