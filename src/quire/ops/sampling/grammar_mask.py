"""Taking tokens that a grammar forbids out of the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.registry import op


@op(mutates=("logits",), is_invariant=True)
def mask_logits(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Set the entries of some rows of logits [R, V] fp32 whose mask bit is 0 to -inf, in place.

    mask [G, ceil(V / 32)] int32 is for the rows [G] int64, each named once: bit i of word w is
    token 32 * w + i. Bits beyond V mean nothing. Raises IndexError for a row that does not exist.
    """
    size = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    for row, words in zip(rows.tolist(), mask, strict=True):
        allowed = torch.bitwise_right_shift(words[:, None], shifts).bitwise_and_(1)
        logits[row].masked_fill_(allowed.flatten()[:size] == 0, -math.inf)
