"""The native op that takes forbidden tokens out of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.runtime import CpuRuntime


class MaskOps:
    """`mask_logits` on a runtime; it computes at once and is not part of a recorded program."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self._runtime = runtime

    def mask_logits(self, logits: Tensor, rows: Tensor, mask: Tensor) -> None:
        """logits [R, V], rows [G], mask [G, ceil(V / 32)]; see quire.ops.sampling.grammar_mask."""
        num_rows, width = logits.shape
        assert self._runtime.program is None, "masks are not recorded"
        assert logits.dtype is torch.float32 and logits.stride(1) == 1
        assert rows.dtype is torch.int64 and rows.is_contiguous()
        assert mask.dtype is torch.int32 and mask.shape == (len(rows), -(-width // 32))
        assert mask.stride(1) == 1
        self._runtime.context.mask(
            len(rows),
            logits.data_ptr(),
            logits.stride(0),
            width,
            num_rows,
            rows.data_ptr(),
            mask.data_ptr(),
            mask.stride(0),
        )
