"""Adds the partial sums of workers that share a product's inputs.

The exchange itself is done by a group of workers (distributed/worker_group.py); the computation on
the exchanged sums is an op like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.registry import op


@op(is_invariant=True)
def add_partials(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The partial sums of S workers, plus bias -> [T, C] in `dtype`.

    parts [S, T, C] unrounded, in the order of the workers, S a power of two; bias [C]. Neighbours
    are added first, as in ((0+1) + (2+3)), so that the order is the same when each of two workers
    brings the sum of what two of four would bring. One rounding, after the bias.
    """
    assert len(parts) & (len(parts) - 1) == 0, "neighbours are added in pairs"
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    total = parts[0] if bias is None else parts[0] + bias
    return total.to(dtype)
