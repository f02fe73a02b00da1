"""The native ops of attention: rotary embedding with the KV write, and attention itself.

A query's bits depend on nothing but itself and the keys it sees: see
csrc/kernels/attention_softmax.hpp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.cpu.kv_ops import CpuKV
from quire.kernels.cpu.program import CpuPlan, IntArray
from quire.kernels.cpu.row_arguments import norm_of, rows_at, turns
from quire.kernels.cpu.runtime import CpuRuntime, NativeOps
from quire.ops import PAD_SLOT
from quire.ops.attention import AttentionArgs
from quire.ops.kv import FixedScales
from quire.ops.norm import NormWeight
from quire.ops.rotary import QKNorm, RotaryTable, refuse_several_positions


class AttentionOps(NativeOps):
    """`rope_store`, `rope_queries`, `plan_attention` and `attend` on a runtime; see quire.ops for
    each.
    """

    def __init__(self, runtime: CpuRuntime) -> None:
        super().__init__(runtime)
        self._kinds = runtime.native.NormKind.__members__
        self._over = runtime.native.NormOver.__members__

    def rope_store(
        self,
        qkv: Tensor,
        kv: CpuKV,
        slots: Tensor,
        positions: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: RotaryTable | None,
        qk_norm: QKNorm | None,
        clip: float | None,
        kv_scales: FixedScales | None = None,
    ) -> Tensor:
        """qkv [T, (H+2K)*D] -> q [T, H, D]; memory is never of e4m3. Raises IndexError for a slot
        or a position that is outside of the memory or the table.
        """
        refuse_several_positions(positions)
        runtime = self._runtime
        qkv, slots, positions = runtime.dense(qkv), runtime.dense(slots), runtime.dense(positions)
        num_tokens = qkv.shape[0]
        assert (kv.kv_heads, kv.head_dim) == (kv_heads, head_dim)
        assert kv.dtype in (qkv.dtype, torch.int8)
        runtime.keep(num_tokens, qkv, kv.memory, slots, positions)
        q = runtime.output((num_tokens, heads, head_dim), qkv.dtype)
        self._rotate(qkv, q, kv.native, slots, positions, rotary, qk_norm, clip)
        return q

    def rope_queries(
        self,
        q: Tensor,
        positions: Tensor,
        *,
        heads: int,
        head_dim: int,
        rotary: RotaryTable | None,
        q_norm: NormWeight | None,
    ) -> Tensor:
        """q [T, H*D] -> [T, H, D]: the kernel of `rope_store` on memory without heads, for tokens
        without slots. Raises IndexError for a position that is outside of the table.
        """
        refuse_several_positions(positions)
        runtime = self._runtime
        q, positions = runtime.dense(q), runtime.dense(positions)
        num_tokens = q.shape[0]
        nowhere = torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64)
        runtime.keep(num_tokens, q, positions, nowhere)
        out = runtime.output((num_tokens, heads, head_dim), q.dtype)
        no_heads = self._native.KVMemory(0, 0, 1, 0, head_dim, 1, 0, 0, 0, 0, False)
        qk_norm = None if q_norm is None else QKNorm(q_norm, q_norm)
        self._rotate(q, out, no_heads, nowhere, positions, rotary, qk_norm, None)
        return out

    def _rotate(
        self,
        source: Tensor,
        q: Tensor,
        memory: object,
        slots: Tensor,
        positions: Tensor,
        rotary: RotaryTable | None,
        qk_norm: QKNorm | None,
        clip: float | None,
    ) -> None:
        num_tokens, heads, head_dim = q.shape
        self._context.rope_store(
            self._types[q.dtype],
            num_tokens,
            heads,
            *rows_at(source),
            q.data_ptr(),
            memory,
            slots.data_ptr(),
            positions.data_ptr(),
            *turns(self._runtime, num_tokens, rotary),
            *self._norms(num_tokens, qk_norm, head_dim, q.dtype),
            math.inf if clip is None else clip,
        )

    def _norms(
        self, num_tokens: int, n: QKNorm | None, head_dim: int, dtype: torch.dtype
    ) -> tuple[object, ...]:
        none = (self._kinds["none"], 0.0, 0, 0)
        if n is None:
            return (self._over["none"], False, *none, *none, 0)
        over = self._over["full" if n.over == "full" else "head"]
        stride = head_dim if n.over == "per_head" else 0
        sides = [norm_of(self._runtime, num_tokens, side, dtype) for side in (n.q, n.k)]
        return (over, n.after_rope, *sides[0], *sides[1], stride)

    def plan_attention(
        self,
        *,
        query_start: IntArray,
        seq_lens: IntArray,
        block_table: Tensor,
        block_size: int,
        window: int | None,
        kv_heads: int | None = None,
    ) -> CpuPlan:
        """A plan with copies of the arrays. kv_heads: threads take work as they come."""
        return CpuPlan.of(query_start, seq_lens, block_table, block_size=block_size, window=window)

    def attend(self, q: Tensor, kv: CpuKV, plan: CpuPlan, args: AttentionArgs) -> Tensor:
        """q [T, H, D] -> [T, H*D]. Raises IndexError for a block id that is not a block's, or a row
        with more new tokens than tokens."""
        assert args.window == plan.window, "the plan was made for another window"
        assert kv.block_size == plan.block_size and kv.dtype in (q.dtype, torch.int8)
        runtime = self._runtime
        q = runtime.dense(q)
        num_tokens, heads, head_dim = q.shape
        assert head_dim == kv.head_dim and heads % kv.kv_heads == 0
        runtime.keep(num_tokens, q, kv.memory, plan.header, args.sinks, args.alibi)
        out = runtime.output((num_tokens, heads * head_dim), q.dtype)
        self._context.attend(
            self._types[q.dtype],
            num_tokens,
            heads,
            *rows_at(q),
            out.data_ptr(),
            kv.native,
            plan.header.data_ptr(),
            args.window or 0,
            args.scale,
            args.softcap or 0.0,
            *self._per_head(args.sinks, heads),
            *self._per_head(args.alibi, heads),
        )
        return out

    def _per_head(self, values: Tensor | None, heads: int) -> tuple[int, object]:
        if values is None:
            return 0, self._types[torch.float32]
        assert values.shape == (heads,) and values.is_contiguous()
        return values.data_ptr(), self._types[values.dtype]
