"""The native ops of attention within whole prompts: see csrc/kernels/attention_prompts.cpp."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.kernels.cpu.program import CpuPlan, IntArray
from quire.kernels.cpu.row_arguments import rows_at
from quire.kernels.cpu.runtime import NativeOps
from quire.ops.step_rows import StepRows


class PromptOps(NativeOps):
    """`plan_prompts` and `attend_prompts` on a runtime; see quire.ops.mixers.prompts."""

    def plan_prompts(self, *, query_start: IntArray, seq_lens: IntArray) -> CpuPlan:
        """A plan with copies of the arrays."""
        nowhere = np.zeros((0, 1), dtype=np.int32)
        rows = np.zeros(len(seq_lens), dtype=np.int32)
        plan = CpuPlan(window=None, block_size=1)
        lengths = query_start.astype(np.int32), seq_lens.astype(np.int32)
        return plan.refill(StepRows(*lengths, nowhere, rows))

    def attend_prompts(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: CpuPlan,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H*D]. Raises IndexError for a row that is not a
        whole prompt.
        """
        runtime = self._runtime
        q, k, v = runtime.dense(q), runtime.dense(k), runtime.dense(v)
        num_tokens, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        assert k.shape == v.shape == (num_tokens, kv_heads, head_dim) and heads % kv_heads == 0
        runtime.keep(num_tokens, q, k, v, plan.header)
        out = runtime.output((num_tokens, heads * head_dim), q.dtype)
        self._context.attend_prompts(
            self._types[q.dtype],
            num_tokens,
            heads,
            kv_heads,
            head_dim,
            *(*rows_at(q), *rows_at(k), *rows_at(v)),
            out.data_ptr(),
            plan.header.data_ptr(),
            window or 0,
            scale,
        )
        return out
