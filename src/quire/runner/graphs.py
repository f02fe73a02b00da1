"""The model's forward pass as a recorded program: the CPU twin of a CUDA graph.

The runner calls `forward(batch)` and cannot tell whether the model or a program answers. Recording
happens once, when the engine is built, for as many tokens as a step may have; a replay serves any
number up to that, so there is one program and no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu_plain import CurrentPlan
from quire.kernels.cpu_plan import CpuPlan
from quire.kernels.cpu_program import Program
from quire.kernels.cpu_runtime import CpuRuntime
from quire.models.decoder import DecoderModel
from quire.ops import Batch, GroupBatch, LayerKV, Ops


class RecordedForward:
    """`DecoderModel.forward` for steps of up to `capacity` tokens.

    The result of a call is valid until the next one.
    """

    def __init__(
        self,
        model: DecoderModel,
        runtime: CpuRuntime,
        ops: Ops,
        *,
        capacity: int,
        block_size: int,
        windows: Sequence[int | None],
        kv: list[LayerKV],
    ) -> None:
        self._model = model
        self._new_program = partial(Program, runtime, capacity)
        self._program: Program | None = None
        self._hidden: Tensor | None = None
        self._plans = [_recorded_plan(ops, block_size, window) for window in windows]
        self._inputs = Batch(
            ids=torch.zeros(capacity, dtype=torch.int64),
            embeds=None,
            positions=torch.zeros((1, capacity), dtype=torch.int64),
            groups=[
                GroupBatch(torch.zeros(capacity, dtype=torch.int64), plan) for plan in self._plans
            ],
            kv=kv,
            num_tokens=capacity,
        )
        self.record()

    def release(self) -> None:
        """Forget the program, which holds the addresses of weights and KV memory, and its
        activations.
        """
        self._program = None
        self._hidden = None

    def record(self) -> None:
        """Record the program over the weights and the KV memory that there are now."""
        self._program = self._new_program()
        with self._program.recording():
            self._hidden = self._model.forward(self._inputs)

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [T, C] of the step."""
        if batch.ids is None:
            return self._model.forward(batch)  # embeddings instead of ids are not recorded
        count, inputs = batch.num_tokens, self._inputs
        assert self._program is not None and self._hidden is not None, "the memory is released"
        assert inputs.ids is not None
        inputs.ids[:count] = batch.ids
        inputs.positions[:, :count] = batch.positions
        for mine, plan, group in zip(inputs.groups, self._plans, batch.groups, strict=True):
            mine.slots[:count] = group.slots
            plan.assign(group.plan)
        self._program.replay(count)
        return self._hidden[:count]


def _recorded_plan(ops: Ops, block_size: int, window: int | None) -> Any:
    """A plan for no rows, which is assigned another before each replay."""
    plan = ops.plan_attention(
        query_start=np.zeros(1, dtype=np.int32),
        seq_lens=np.zeros(0, dtype=np.int32),
        block_table=torch.zeros((0, 1), dtype=torch.int32),
        block_size=block_size,
        window=window,
    )
    return plan if isinstance(plan, CpuPlan) else CurrentPlan(plan)
