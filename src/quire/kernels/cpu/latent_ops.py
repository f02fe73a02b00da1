"""The native ops of latent attention: products of each head, storing latents, and attention.

A query's bits depend on nothing but itself and the latents it sees: see
csrc/kernels/latent_tile.hpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.program import CpuPlan, IntArray
from quire.kernels.cpu.row_arguments import norm_of, rows_at, turns
from quire.kernels.cpu.runtime import NativeOps
from quire.kernels.cpu.unpacking import plain_rows
from quire.ops.kv import LayerLatents
from quire.ops.norm import NormWeight
from quire.ops.rotary import RotaryTable, refuse_several_positions


@dataclass(frozen=True, slots=True)
class CpuHeads:
    """A weight per head in panels of outputs (csrc/kernels/linear_pack.cpp), one head after the
    other; `native` is that of the first.
    """

    native: Any
    dtype: torch.dtype
    heads: int
    in_features: int
    out_features: int
    panels: Tensor

    def plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A copy of its values as weight [H, out, in]."""
        shape = self.out_features, self.in_features
        rows = [plain_rows(panels, *shape, gated=False) for panels in self.panels]
        yield "weight", torch.stack(rows)


class LatentOps(NativeOps):
    """`pack_heads`, `heads_linear`, `latent_store`, `plan_latent` and `latent_attend` on a runtime;
    see quire.ops for each.
    """

    def pack_heads(self, weight: Tensor) -> CpuHeads:
        """weight [H, out, in] is copied."""
        assert self._runtime.program is None, "weights are packed before recording"
        native, width = self._native, self._native.panel_width
        heads, out_features, in_features = weight.shape
        shape = (heads, -(-out_features // width), -(-in_features // 2), 2 * width)
        panels = self._runtime.weight_memory(shape, weight.dtype)

        def packed(head: int) -> Any:
            return native.PackedWeight(
                self._types[weight.dtype],
                native.WeightForm.plain,
                in_features,
                out_features,
                0,
                panels[head].data_ptr(),
                0,
                0,
                False,
                1,
                False,
            )

        for head, part in enumerate(weight):
            part = self._runtime.dense(part)
            to = panels[head].data_ptr()
            self._context.pack(packed(head), 0, len(part), *rows_at(part), to, 0)
        return CpuHeads(packed(0), weight.dtype, heads, in_features, out_features, panels)

    def heads_linear(self, x: Tensor, w: CpuHeads) -> Tensor:
        """x [T, H, in] -> [T, H, out]."""
        runtime = self._runtime
        x = runtime.dense(x)
        num_tokens = x.shape[0]
        assert x.shape[1:] == (w.heads, w.in_features) and x.dtype is w.dtype
        runtime.keep(num_tokens, x, w.panels)
        y = runtime.output((num_tokens, w.heads, w.out_features), x.dtype)
        self._context.heads_linear(
            w.native,
            w.heads,
            w.panels.stride(0) * w.panels.element_size(),
            num_tokens,
            *rows_at(x),
            y.data_ptr(),
        )
        return y

    def latent_store(
        self,
        q: Tensor,
        x: Tensor,
        latents: LayerLatents,
        slots: Tensor,
        positions: Tensor,
        *,
        norm: NormWeight,
        rotary: RotaryTable | None,
    ) -> Tensor:
        """q [T, H, R], x [T, r + R] -> [T, H, R]. Raises IndexError for a slot or a position that
        is outside of the memory or the table."""
        refuse_several_positions(positions)
        runtime = self._runtime
        q, x, slots, positions = map(runtime.dense, (q, x, slots, positions))
        num_tokens, heads, rotated = q.shape
        assert x.shape[1] == latents.width == latents.rank + rotated
        assert x.dtype is q.dtype is latents.data.dtype
        assert rotary is None or rotary.dim == rotated
        table, num_positions, _, interleaved = turns(runtime, num_tokens, rotary)
        runtime.keep(num_tokens, q, x, latents.data, slots, positions)
        out = runtime.output(q.shape, q.dtype)
        self._context.latent_store(
            self._types[q.dtype],
            num_tokens,
            heads,
            *rows_at(q),
            out.data_ptr(),
            *rows_at(x),
            self._memory(latents),
            slots.data_ptr(),
            positions.data_ptr(),
            table,
            num_positions,
            interleaved,
            *norm_of(runtime, num_tokens, norm, x.dtype),
        )
        return out

    def plan_latent(
        self,
        *,
        query_start: IntArray,
        seq_lens: IntArray,
        block_table: Tensor,
        block_size: int,
    ) -> CpuPlan:
        """A plan with copies of the arrays."""
        return CpuPlan.of(query_start, seq_lens, block_table, block_size=block_size)

    def latent_attend(
        self, q: Tensor, q_rotated: Tensor, latents: LayerLatents, plan: CpuPlan, scale: float
    ) -> Tensor:
        """q [T, H, r], q_rotated [T, H, R] -> [T, H, r]. Raises IndexError for a block id that is
        no block's, or a row with more new tokens than tokens."""
        runtime = self._runtime
        q, q_rotated = runtime.dense(q), runtime.dense(q_rotated)
        num_tokens, heads, rank = q.shape
        assert rank == latents.rank and q_rotated.shape[2] == latents.width - rank
        assert latents.block_size == plan.block_size and latents.data.dtype is q.dtype
        runtime.keep(num_tokens, q, q_rotated, latents.data, plan.header)
        out = runtime.output(q.shape, q.dtype)
        self._context.latent_attend(
            self._types[q.dtype],
            num_tokens,
            heads,
            *rows_at(q),
            *rows_at(q_rotated),
            out.data_ptr(),
            self._memory(latents),
            plan.header.data_ptr(),
            scale,
        )
        return out

    def _memory(self, latents: LayerLatents) -> Any:
        data = latents.data
        assert data.stride()[1:] == (latents.width, 1)
        return self._native.LatentMemory(
            data.data_ptr(),
            latents.num_blocks,
            latents.block_size,
            data.stride(0) * data.element_size(),
            latents.rank,
            latents.width - latents.rank,
        )
