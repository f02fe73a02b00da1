"""Cases of the ops of workers that have a part of the inputs each."""

from __future__ import annotations

from quire.ops.catalog import Ops
from tests.support.op_cases.case import Case, Draw, Prepared, by_row
from tests.support.op_cases.products import addend_of


def _peaks(rows: int, *, has_nan: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        x = (draw.with_nan if has_nan else draw.normal)(rows, 9)
        return by_row("row_peaks", {"x": x})

    return Case("row_peaks", f"{rows}{'-nan' * has_nan}", prepare)


def _partial(segments: int, rows: int, width: int = 24) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        weight = draw.normal(19, width, scale=width**-0.5)
        arguments = {
            "x": draw.normal(rows, width),
            "w": ops.pack_linear(weight, None, segments=segments),
            "peaks": None,
        }
        return by_row("linear_partial", arguments)

    return Case("linear_partial", f"{segments}x{rows}x{width}", prepare)


def _total(
    segments: int, rows: int, *, bias: bool = False, addend: bool = False, scale: float = 1.0
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        weight, given = draw.normal(9, 8), draw.normal(9) if bias else None
        arguments = {
            "parts": draw.wide(draw.rng.standard_normal((rows, segments, 9)) * scale),
            "w": ops.pack_linear(weight, given, segments=segments),
            "peaks": None,
            "dtype": draw.dtype,
            "addend": addend_of(draw, rows, 9) if addend else None,
        }
        return Prepared(arguments) if addend else by_row("linear_total", arguments)

    traits = f"{'-bias' * bias}{'-addend' * addend}"
    return Case("linear_total", f"{segments}x{rows}-scale{scale:g}{traits}", prepare)


CASES = (
    *(_peaks(rows) for rows in (0, 1, 5)),
    _peaks(3, has_nan=True),
    *(_partial(segments, rows) for segments in (1, 2, 4) for rows in (0, 1, 5)),
    _partial(4, 3, 560),
    *(_total(2, rows) for rows in (0, 1, 5)),
    *(_total(segments, 4, bias=True) for segments in (1, 2, 4)),
    *(_total(segments, 4, bias=True, addend=True) for segments in (1, 4)),
    _total(4, 3, scale=100.0),
)
