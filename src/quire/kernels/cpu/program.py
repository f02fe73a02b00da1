"""A model's forward pass as a list of native calls, recorded once and replayed every step, and the
attention plans that it reads: the rows of a step at addresses that stay.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.ops.step_rows import StepRows

PLAN_FIELDS = 7
"""Fields of 8 bytes of `AttentionStep` in csrc/kernels/kernels.hpp."""

IntArray = np.ndarray


class CpuPlan:
    """The rows of a step in memory that the kernels read when they run.

    A recorded program reads the plan that it was recorded with: `refill` that one before each
    replay.
    """

    def __init__(self, window: int | None, block_size: int) -> None:
        """A plan for no rows."""
        self.window = window
        self.block_size = block_size
        self.header = torch.zeros(PLAN_FIELDS, dtype=torch.int64)  # AttentionStep
        self._fields = self.header.numpy()
        start, none, table = (np.zeros(shape, dtype=np.int32) for shape in (1, 0, (0, 1)))
        self._held: tuple[IntArray, ...] = ()
        self.refill(StepRows(start, none, table, none))

    @classmethod
    def of(
        cls,
        query_start: IntArray,
        seq_lens: IntArray,
        block_table: torch.Tensor,
        *,
        block_size: int,
        window: int | None = None,
    ) -> CpuPlan:
        """A plan with copies of a step's arrays: see `plan_attention`."""
        step = StepRows(
            query_start.astype(np.int32),
            seq_lens.astype(np.int32),
            block_table.numpy().astype(np.int32, order="C"),
            np.arange(len(seq_lens), dtype=np.int32),
        )
        return cls(window, block_size).refill(step)

    def refill(self, step: StepRows) -> CpuPlan:
        """Describe another step. Arrays are not copied: their contents must not change before the
        step is over, except the table's beyond the lengths. Gives this plan; for the arrays that it
        has already there is nothing to do.
        """
        query_start, seq_lens, block_table, rows, _ = step
        arrays = (query_start, seq_lens, block_table, rows)
        # the header has addresses alone: arrays that were filled anew in place need no other one
        if len(self._held) == len(arrays) and all(map(operator.is_, arrays, self._held)):
            return self
        assert len(query_start) == len(seq_lens) + 1 == len(rows) + 1
        for array in arrays:
            assert array.dtype == np.int32 and (array.size == 0 or array.strides[-1] == 4)
        self._held = arrays
        self._fields[:] = (
            len(seq_lens),
            query_start.ctypes.data,
            seq_lens.ctypes.data,
            block_table.ctypes.data,
            rows.ctypes.data,
            block_table.strides[0] // 4,
            0,
        )
        return self

    def refill_spans(self, step: StepRows, whole: IntArray) -> CpuPlan:
        """The same with spans; see `quire.ops.attention.SpanPlan`."""
        assert whole.dtype == np.int32 and whole.shape == step.rows.shape and whole.strides == (4,)
        self.refill(step)
        self._held = (*self._held, whole)
        self._fields[-1] = whole.ctypes.data
        return self

    @property
    def lengths(self) -> tuple[IntArray, IntArray]:
        """See `AttentionPlan`."""
        query_start, seq_lens, *_ = self._held
        return np.diff(query_start), seq_lens


class RecordingRuntime(Protocol):
    """The runtime whose calls a program records (runtime.py)."""

    native: ModuleType
    context: Any

    def record_into(self, program: Program) -> AbstractContextManager[None]:
        """Send the calls of ops into `program` while the block runs."""
        ...


class Program:
    """The calls of ops between `recording()`'s begin and end, to be run for any T up to `capacity`.

    Recording computes nothing. Give it inputs [capacity, ...] in buffers that you keep and refill
    for each step; what comes out is [capacity, ...] as well, and its first T rows hold the results
    of the last `replay(T)`. The memory of an activation is used again as soon as its last tensor
    dies, so hold on to what you want to read.

    ```
    program = Program(runtime, capacity=256)
    with program.recording():
        hidden = model.forward(batch)  # a batch of 256 tokens, in fixed buffers
    ids[:3].copy_(...)
    program.replay(3)
    hidden[:3]
    ```
    """

    def __init__(self, runtime: RecordingRuntime, capacity: int) -> None:
        """capacity: the most tokens of a step, >= 1."""
        assert capacity >= 1
        self.runtime = runtime
        self.capacity = capacity
        self.native = runtime.native.Recording(capacity)
        self._calls: list[Callable[[int], object]] = []
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """The number of recorded calls."""
        return len(self.native)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the runtime's ops in the block, after those that are there."""
        with self.runtime.record_into(self):
            yield

    def call(self, function: Callable[[int], object]) -> None:
        """Record a Python function, called with T in its place among the native calls.

        It may use torch and ops. Activations that it reads or writes it should hold as `borrow`s,
        or their memory serves nothing else. What it raises ends the replay.
        """
        self.native.append_foreign(len(self._calls))
        self._calls.append(function)

    def replay(self, num_tokens: int) -> None:
        """Run all calls for the first num_tokens rows of the buffers.

        The GIL is released in between. Raises IndexError for a token id outside of its table, and
        whatever a Python entry raises; the results are then arbitrary.
        """
        self.runtime.context.replay(self.native, num_tokens, self._calls)

    @property
    def nbytes(self) -> int:
        """Memory of the activations; pages that no step has touched take none."""
        return int(self.native.num_bytes)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result, from the program's arena while any tensor on it lives."""
        count = math.prod(shape)
        if count == 0:
            # torch.frombuffer refuses a buffer without bytes
            return torch.empty(shape, dtype=dtype)
        buffer = self.native.take(count * dtype.itemsize)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def borrow(self, x: Tensor) -> Tensor:
        """The same elements without a claim on the memory, to be used at this place of the program
        only. A tensor that is not an activation of the program is returned as it is.
        """
        if x.numel() == 0 or not self.native.owns(x.data_ptr()):
            return x
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        buffer = self.native.borrow(x.data_ptr(), (last + 1) * x.element_size())
        return torch.frombuffer(buffer, dtype=x.dtype).as_strided(x.shape, x.stride())

    def keep(self, num_tokens: int, *tensors: Tensor | None) -> None:
        """Hold on to what a call reads, apart from activations, which live in the arena."""
        assert num_tokens == self.capacity, "a program is recorded with as many tokens as it holds"
        for tensor in tensors:
            if tensor is not None and not self.native.owns(tensor.data_ptr()):
                # by address: what many calls read is kept once
                self._kept[tensor.data_ptr()] = tensor
