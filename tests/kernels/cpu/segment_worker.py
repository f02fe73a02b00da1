"""A process that has some of a product's inputs: writes the sums of its segments, for groups of two
and of four workers.

python -m tests.kernels.cpu.segment_worker FOLDER HALF
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import Ops, WeightFormat, select

INPUTS, OUT, ROWS = 768, 45, 9
FORMATS = {
    "plain": None,
    "int8": WeightFormat("int8"),
    "int4": WeightFormat("int4", 64),
    "int8-weight-only": WeightFormat("int8", 0, False),
    "int4-weight-only": WeightFormat("int4", 32, False),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cpu_ops(dtype: torch.dtype, isa: str | None = None, num_threads: int = 2) -> Ops:
    runtime = CpuRuntime(num_threads=num_threads, isa=isa)
    return select(device="cpu", dtype=dtype, providers=["cpu"], runtime=runtime)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of different sizes."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(*shape, generator=generator)
    values[1::3] *= 7
    return values.to(dtype)


def part_of(x: Tensor, rank: int, size: int) -> Tensor:
    width = x.shape[1] // size
    return x[:, rank * width : (rank + 1) * width]


def partial(
    ops: Ops,
    x: Tensor,
    weight: Tensor,
    stored_as: WeightFormat | None,
    rank: int,
    size: int,
    whole: tuple[Tensor, Tensor] | None = None,
    segments: int = 4,
) -> Tensor:
    """The sums of one of `size` workers. whole: the peaks of x and of the weight,
    as workers exchange them.
    """
    peaks, weight_peaks = whole or (ops.row_peaks(x), ops.row_peaks(weight))
    packed = ops.pack_linear(
        part_of(weight, rank, size), None, stored_as, segments // size, weight_peaks
    )
    found: Tensor = ops.linear_partial(part_of(x, rank, size), packed, peaks)
    return found


def main(folder: Path, half: int) -> None:
    """Rank 0 or 1 of two; every second of four."""
    for dtype in DTYPES:
        ops = cpu_ops(dtype)
        x, weight = draw(ROWS, INPUTS, dtype=dtype), draw(OUT, INPUTS, dtype=dtype, seed=1)
        for name, stored_as in FORMATS.items():
            for rank, size in ((half, 2), (half, 4), (half + 2, 4)):
                sums = partial(ops, x, weight, stored_as, rank, size)
                torch.save(sums, folder / f"{name}-{dtype}-{size}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
