"""The exchange between workers as entries of the programs that they record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.distributed.shared_group import SharedGroup, has_dense_rows
from quire.distributed.worker_group import WorkerGroup
from quire.kernels.cpu.linear_ops import CpuLinear
from quire.kernels.cpu.row_arguments import address_of
from quire.kernels.cpu.runtime import CpuRuntime


class RecordedGroup:
    """A worker's side of `group`, whose exchanges record themselves while a program records.

    Each worker records its own program, at any time. The exchanges happen in the replays: the
    programs that the workers replay at the same time have the same exchanges, and as many tokens.
    """

    def __init__(self, runtime: CpuRuntime, group: WorkerGroup) -> None:
        self._runtime = runtime
        self._group = group
        self.rank, self.size = group.rank, group.size

    def gather(self, x: Tensor, out: Tensor | None = None, *, to_first: bool = False) -> Tensor:
        if self._runtime.program is None:
            return self._group.gather(x, out, to_first=to_first)
        result = self._result(x, (self.size, *x.shape[1:]))
        # native calls of the exchange: the program need not come back to Python for it
        if isinstance(self._group, SharedGroup) and has_dense_rows(x):
            self._group.gather_by(self._runtime.context, x, result, to_first=to_first)
            return result
        return self._record(self._group.gather, x, result)

    def largest(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._runtime.program is None:
            return self._group.largest(x, out)
        result = self._result(x, ())
        if isinstance(self._group, SharedGroup) and x.dtype is torch.float32:
            self._group.largest_by(self._runtime.context, x, result)
            return result
        return self._record(self._group.largest, x, result)

    def product(self, x: Tensor, weight: Any, peaks: Tensor | None) -> Tensor | None:
        runtime, group = self._runtime, self._group
        if runtime.program is None or not isinstance(group, SharedGroup):
            return None
        if not isinstance(weight, CpuLinear) or not group.has_room(weight.out_features):
            return None
        assert not weight.gated and (peaks is not None or not weight.rounds_rows)
        x = runtime.dense(x)
        held = weight.memory, weight.scales, weight.bias, weight.order
        runtime.keep(len(x), x, peaks, *held)
        y = runtime.output((len(x), weight.out_features), x.dtype)
        group.product_by(
            *(runtime.context, x, weight.native, address_of(peaks)),
            *(weight.has_whole_sums, weight.rounds_rows),
            *map(address_of, (weight.scales, weight.bias)),
            *(runtime.types[x.dtype], y.data_ptr()),
        )
        return y

    def outputs(self, compute: Callable[[], Tensor], num_rows: int, width: int) -> Tensor | None:
        runtime, group = self._runtime, self._group
        if runtime.program is None or not isinstance(group, SharedGroup):
            return None
        # nobody writes here before all have met again: for the ids, which the first worker draws
        # from what it reads here
        whole = group.board(num_rows, self.size, width)
        runtime.keep(num_rows, whole)
        with runtime.result_in(whole[:, self.rank]):
            compute()
        group.meet_by(runtime.context)
        return whole

    def apply(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int
    ) -> Tensor:
        program = self._runtime.program
        if program is None:
            return function(*inputs)
        result = program.output((program.capacity, width), inputs[0].dtype)
        sources, place = [program.borrow(x) for x in inputs], program.borrow(result)

        def entry(num_tokens: int) -> None:
            place[:num_tokens] = function(*(source[:num_tokens] for source in sources))

        program.call(entry)
        return result

    def broadcast(self, x: Tensor) -> Tensor:
        return self._group.broadcast(x)

    def _result(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory for the result [T, shape] of an exchange of x [T, *]."""
        program = self._runtime.program
        assert program is not None and len(x) == program.capacity
        program.keep(len(x), x)
        return program.output((program.capacity, *shape), x.dtype)

    def _record(
        self, exchange: Callable[[Tensor, Tensor], object], x: Tensor, result: Tensor
    ) -> Tensor:
        """Record an exchange of x as a call of Python."""
        program = self._runtime.program
        assert program is not None
        source, place = program.borrow(x), program.borrow(result)

        def entry(num_tokens: int) -> None:
            exchange(source[:num_tokens], place[:num_tokens])

        program.call(entry)
        return result
