"""Cases of the ops between workers."""

from __future__ import annotations

from quire.ops.select import Ops
from tests.support.op_cases.case import Case, Draw, Prepared, by_row


def _partials(size: int, rows: int, *, has_bias: bool, scale: float = 1.0) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "parts": draw.wide(draw.rng.standard_normal((size, rows, 9)) * scale),
            "bias": draw.normal(9) if has_bias else None,
            "dtype": draw.dtype,
        }
        return by_row(arguments, {"parts": 1})

    return Case("add_partials", f"{size}x{rows}-scale{scale:g}{'-bias' * has_bias}", prepare)


CASES = (
    *(_partials(2, rows, has_bias=False) for rows in (0, 1, 5)),
    *(_partials(size, 4, has_bias=True) for size in (1, 2, 4)),
    _partials(4, 3, has_bias=False, scale=100.0),
)
