"""Products of Triton with the weights of real models, few rows to many, and what other tiles take.

Tiles were chosen without a GPU (`quire.kernels.triton.linear.product_tiles`). A note that names
another tile as faster by a tenth or more says what to change there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from gpu.ceilings import Ceilings
from gpu.kernels import Measured, product
from gpu.told import Line
from quire.kernels.triton.linear import triton_linear as kernels
from quire.kernels.triton.linear.product_tiles import ProductTile
from quire.ops import WeightFormat, select

PROJECTIONS = {
    "out 8B": (4096, 4096), "gate_up 8B": (4096, 28_672), "down 8B": (14_336, 4096),
    "down 0.6B": (3072, 1024),
}  # fmt: skip
"""Inputs and outputs of weights that a model reads in each step."""

FAST = (WeightFormat("int4", 32), WeightFormat("int4", 128, rounds_rows=False))
FAST += (WeightFormat("int8"),)
FIXED = (None, WeightFormat("fp8"))
ROWS = (1, 16, 64, 256)

Change = Callable[[ProductTile], ProductTile]
OTHERS: dict[str, Change] = {
    "half the outputs": lambda tile: replace(tile, outputs=tile.outputs // 2),
    "twice the outputs": lambda tile: replace(tile, outputs=tile.outputs * 2),
    "half the stages": lambda tile: replace(tile, stages=max(2, tile.stages // 2)),
    "twice the warps": lambda tile: replace(tile, warps=tile.warps * 2),
}
"""What is tried beside the tile that is chosen, where it is noted."""


def table(ceilings: Ceilings, until: float, device: str = "cuda") -> Iterator[Line]:
    """A line for each weight, kind and number of rows; for one weight with few and more rows what
    other tiles take, as long as it is not `until` (time.monotonic).
    """
    for is_fixed, forms in ((False, FAST), (True, FIXED)):
        ops = select(device=device, dtype=torch.bfloat16, deterministic=is_fixed)
        for stored_as in forms:
            for name, (width, outputs) in PROJECTIONS.items():
                for rows in ROWS:
                    found = product(ops, rows, stored_as, device, width, outputs)
                    line = replace(found, name=f"{name} {found.name}").line(ceilings, None)
                    yield replace(line, what=line.what + " fixed" * is_fixed)
    ops = select(device=device, dtype=torch.bfloat16)
    for stored_as in FAST:
        for rows in (1, 64):
            if time.monotonic() < until:
                yield compared(lambda at=(ops, rows, stored_as, device, 4096, 4096): product(*at))


def compared(measure: Callable[[], Measured]) -> Line:
    """By what the fastest of the other tiles is faster than the chosen one."""
    chosen = measure()
    seconds = {name: seconds_with(change, measure) for name, change in OTHERS.items()}
    note = ", ".join(f"{name} {_told(taken)}" for name, taken in seconds.items())
    best = min(taken for taken in seconds.values() if taken is not None)
    gain = 100 * (chosen.seconds / best - 1)
    note = f"{_told(chosen.seconds)}; {note}"
    return Line(f"other tiles, {chosen.name}", gain, "% faster", 10, is_least=False, note=note)


def seconds_with(change: Change, measure: Callable[[], Measured]) -> float | None:
    """What the product takes with another tile; None if it does not start or compile."""
    try:
        with tiles_changed(change):
            return measure().seconds
    except Exception:  # a tile that is too large; the chosen one has been measured
        return None


@contextmanager
def tiles_changed(change: Change) -> Iterator[None]:
    """Products of Triton have tiles changed so, within."""
    choose = kernels.tile_of
    kernels.tile_of = lambda rows, shape: change(choose(rows, shape))  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels.tile_of = choose  # type: ignore[assignment]


def _told(seconds: float | None) -> str:
    return "does not run" if seconds is None else f"{seconds * 1e6:.1f} us"
