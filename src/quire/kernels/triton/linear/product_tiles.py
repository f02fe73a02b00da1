"""The tile that a program of a product multiplies: chosen by the class of the number of rows and by
the weight, when the product is launched.

With few rows a product takes the time in which its weight is read. Then memory must be kept busy:
by Little's law 4.8 TB/s (H200) times a latency of 700 to 1,000 ns are 3.4 to 4.8 MB in flight, or
25 to 36 KB for each of 132 SMs. So with few rows

- a program has few outputs, so that most SMs have one: 32 of 4096 are 128 programs. Splitting the
  inputs would give as many, but also partial sums to write, and a second kernel to add them, which
  takes longer than the few microseconds of the whole product (8.4 MB of int4 are 1.8 us);
- it reads 128 bytes of each output at once, and as many of these tiles ahead as Little's law asks;
- it has 16 rows: tensor cores take no fewer, and 64 would multiply 63 rows of nothing.

With more rows the traffic of x from the second-level cache, N / outputs times x, soon is what takes
the time, and arithmetic after that: tiles grow in both directions.

There are three classes only, since each is a compilation at start: warm-up runs steps of each
(`quire.runner.warm_up`).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.triton.launch import FLOAT32_WARPS

FEW, MORE, MANY = 16, 64, 128
"""Rows of a tile in each class."""

MOST_FEW, MOST_MORE = 16, 256
"""Rows of a product in the first two classes, at most."""

# of an H100 (SXM)
_SMS = 132
_BYTES_IN_FLIGHT = 4 << 20
_RUN = 128
"""Bytes of an output's weights that a program reads at once: a line of the cache."""

_FOR_RESULTS = 27 << 10
"""Bytes of shared memory that tiles on their way leave: of 227 KB on Hopper, 99 on Ada."""

_MOST_STAGES = 14


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A weight to multiply with: outputs, bits of a stored number, bytes of a number of x, for four
    bits the inputs of a pair of groups, experts that are read at once, and the bytes of shared
    memory that a program may have.
    """

    outputs: int
    bits: int
    x_bytes: int
    unit: int = 1
    experts: int = 1
    shared_memory: int = 227 << 10


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows, outputs and inputs that a program multiplies at once, how many such steps it reads
    ahead, and warps.
    """

    rows: int
    outputs: int
    depth: int
    stages: int
    warps: int


def row_class(rows: int, unit: int, *, is_fixed: bool) -> int:
    """The rows of a tile for a product with `rows` rows. unit: that of the weight's
    `ProductShape`; with 256 inputs at once a tile of many rows would not fit. is_fixed: a row's
    bits must not depend on their number.
    """
    if is_fixed:
        return MORE
    if rows <= MOST_FEW:
        return FEW
    return MORE if rows <= MOST_MORE or unit > 128 else MANY


def tile_of(rows: int, shape: ProductShape) -> ProductTile:
    """The tile with `rows` rows, as `row_class` returns them."""
    outputs = _outputs(rows, shape)
    depth = _depth(rows, shape)
    return ProductTile(
        rows, outputs, depth, _stages(rows, outputs, depth, shape), _warps(rows, outputs)
    )


def run_tile(rows: int, depth: int, shape: ProductShape) -> ProductTile:
    """The tile of a product whose steps are `depth` inputs in every class; at most MORE rows."""
    outputs = _outputs(rows, shape)
    stages = min(6, _stages(rows, outputs, depth, shape))
    return ProductTile(rows, outputs, depth, stages, _warps(rows, outputs))


def float32_tile(shape: ProductShape) -> ProductTile:
    """The one tile where operands are float32: without tensor cores every thread keeps whole rows
    of them in registers, so they are short, and many threads share them.
    """
    return ProductTile(MORE, 64, max(shape.unit, 64), 2, FLOAT32_WARPS)


def _outputs(rows: int, shape: ProductShape) -> int:
    """As many outputs as leave a program to most SMs, or to half of them where x would be read too
    often otherwise.
    """
    if rows == MANY:
        return 128
    sizes, programs = ((64, 32), 120) if rows == FEW else ((128, 64), 60)
    for outputs in sizes:
        if shape.outputs * shape.experts >= outputs * programs:
            return outputs
    return sizes[-1] // 2


def _depth(rows: int, shape: ProductShape) -> int:
    """Inputs of a run of each output's weights. With four bits, where the loop is unrolled over
    pairs of groups, two pairs at most (the compiler takes three times as long for four) and, beyond
    few rows, half a run, since as many inputs of x come with it.
    """
    if shape.bits != 4:
        return _RUN * 8 // shape.bits
    run = _RUN * 2 if rows == FEW else _RUN
    return max(shape.unit, min(run, 2 * shape.unit))


def _stages(rows: int, outputs: int, depth: int, shape: ProductShape) -> int:
    """Tiles in shared memory: one is multiplied, the others are on their way."""
    programs = -(-shape.outputs * shape.experts // outputs)
    weights = outputs * depth * shape.bits // 8
    wanted = 1 + -(-_BYTES_IN_FLIGHT // (weights * min(programs, 2 * _SMS)))
    room = (shape.shared_memory - _FOR_RESULTS) // (2 if programs > _SMS and rows != MANY else 1)
    fitting = room // (weights + rows * depth * shape.x_bytes)
    return max(2, min(wanted, fitting, _MOST_STAGES))


def _warps(rows: int, outputs: int) -> int:
    """One warp for each 16 outputs up to four, eight for 128. Two with few rows: four would have 64
    outputs multiplied by the instructions for whole warp groups, for which weights that are widened
    come out of shared memory two bytes at a time.
    """
    if outputs == 128:
        return 8
    return min(2 if rows == FEW else 4, outputs // 16)
