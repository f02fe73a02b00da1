"""Writing of new values into the memory of weights that the provider "cpu" has packed, and a look
at the values before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quire.kernels.cpu.expert_ops import CpuExperts
from quire.kernels.cpu.linear_ops import CpuLinear
from quire.kernels.cpu.runtime import CpuRuntime

_SLICE_BYTES = 4 << 20
"""Smaller tensors are looked at by the calling thread alone, and written by torch."""


class CpuWeightWriter:
    """See `WeightWriter`."""

    looks_while_packing = True

    def __init__(self, runtime: CpuRuntime) -> None:
        self._runtime = runtime

    def replacing(self, parts: Iterable[object]) -> AbstractContextManager[Callable[[], bool]]:
        """See `WeightWriter`."""
        return self._runtime.weights_replace([m for part in parts for m in _memories(part)])

    def open_rows(self, part: object) -> PanelRows | TableRows | None:
        """See `WeightWriter`."""
        if isinstance(part, Tensor):
            is_table = part.dim() == 2 and part.nbytes >= _SLICE_BYTES and _is_plain(part)
            if not is_table or part.dtype not in self._runtime.types:
                return None
            return TableRows(self._runtime, part)
        if not isinstance(part, CpuLinear) or part.codes is not None:
            return None
        return PanelRows(self._runtime, part)

    def look_at(self, tensor: Tensor, *, adds_up: bool) -> tuple[bool, tuple[int, ...]] | None:
        """See `WeightWriter`: of floats that lie in one piece."""
        kind = self._runtime.types.get(tensor.dtype)
        if kind is None or not _is_plain(tensor):
            return None
        is_small = tensor.nbytes < _SLICE_BYTES
        scan = (self._runtime.single if is_small else self._runtime.context).scan
        has_nan, sums = scan(kind, tensor.data_ptr(), tensor.nbytes, adds_up)
        return has_nan, tuple(sums)


class PanelRows:
    """See `RowWriter`."""

    def __init__(self, runtime: CpuRuntime, part: CpuLinear) -> None:
        self._runtime, self._part = runtime, part
        self.bias = part.bias

    def write(self, first: int, rows: Tensor, *, is_slice: bool) -> bool:
        """See `RowWriter`."""
        # whoever brings the next rows works on another processor meanwhile: threads of ours would
        # take that from it, and wait for it
        context = self._runtime.single if is_slice else self._runtime.context
        rows, part = self._runtime.dense(rows), self._part
        where = rows.data_ptr(), rows.stride(0), part.panels.data_ptr()
        return bool(context.pack(part.native, first, rows.shape[0], *where, 0, True))


class TableRows:
    """`RowWriter` of a tensor whose rows are those that come."""

    bias: Tensor | None = None

    def __init__(self, runtime: CpuRuntime, table: Tensor) -> None:
        self._runtime, self._table = runtime, table
        self._kind = runtime.types[table.dtype]

    def write(self, first: int, rows: Tensor, *, is_slice: bool) -> bool:
        """See `RowWriter`."""
        context = self._runtime.single if is_slice else self._runtime.context
        rows, to = rows.contiguous(), self._table[first : first + rows.shape[0]]
        assert rows.nbytes == to.nbytes, "bytes are copied as they are"
        has_nan, _ = context.scan(self._kind, rows.data_ptr(), rows.nbytes, False, to.data_ptr())
        return bool(has_nan)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes > 0


def _memories(part: object) -> Iterator[Tensor]:
    """The memory of a packed weight, in the order in which packing asks for it."""
    if isinstance(part, CpuLinear):
        yield part.panels
    elif isinstance(part, CpuExperts) and (whole := _of_experts(part)) is not None:
        yield whole


def _of_experts(part: CpuExperts) -> Tensor | None:
    """The one piece of memory that experts are packed into; None where they lie elsewhere."""
    sizes = part.up[0].panels.nbytes, part.down[0].panels.nbytes
    first, row = part.up[0].panels, sum(sizes)
    for i, (up, down) in enumerate(zip(part.up, part.down, strict=True)):
        at = first.data_ptr() + i * row
        if (up.panels.data_ptr(), down.panels.data_ptr()) != (at, at + sizes[0]):
            return None
    storage = first.untyped_storage()
    start = first.data_ptr() - storage.data_ptr()
    # several pieces of memory may be neighbours by chance
    if start + part.experts * row > storage.nbytes():
        return None
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return whole[start : start + part.experts * row].view(part.experts, row)
