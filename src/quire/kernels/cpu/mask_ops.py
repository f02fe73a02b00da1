"""The native op that takes forbidden tokens out of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.row_arguments import rows_at
from quire.kernels.cpu.runtime import NativeOps


class MaskOps(NativeOps):
    """`mask_logits` on a runtime; it computes at once and is not part of a recorded program."""

    def mask_logits(self, logits: Tensor, rows: Tensor, mask: Tensor) -> None:
        """logits [R, V], rows [G], mask [G, ceil(V / 32)]; see quire.ops.sampling.grammar_mask."""
        num_rows, width = logits.shape
        assert self._runtime.program is None, "masks are not recorded"
        assert logits.dtype is torch.float32 and logits.stride(1) == 1
        assert rows.dtype is torch.int64 and rows.is_contiguous()
        assert mask.dtype is torch.int32 and mask.shape == (len(rows), -(-width // 32))
        assert mask.stride(1) == 1
        self._context.mask(
            len(rows), *rows_at(logits), width, num_rows, rows.data_ptr(), *rows_at(mask)
        )
