"""Token ids to hidden states: rows of a table, or of the packed weight of a head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.ops.linear import PlainLinear
from quire.ops.registry import op


@op(axes={"ids": 0, "positions": 0}, is_invariant=True)
def embed(
    ids: Tensor,
    table: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    """table[ids] * scale (+ position_table[positions]): ids [T] int64, table [V, C] -> [T, C].

    positions [T] int64 are rows of position_table [P, C] (a family's offset already added); both or
    neither are given. `scale` is used as given: Gemma rounds its own to the model's dtype, which is
    the caller's part. An id outside the table raises IndexError on the CPU.
    """
    assert (positions is None) == (position_table is None)
    x = F.embedding(ids, table)
    if scale != 1.0:
        x = x.mul_(scale)
    if positions is not None and position_table is not None:
        x = x.add_(F.embedding(positions, position_table))
    return x


@op(axes={"ids": 0}, format="linear")
def embed_packed(ids: Tensor, w: PlainLinear, scale: float = 1.0) -> Tensor:
    """`embed` with the weight [V, C] of a head as its table: ids [T] int64 -> [T, C].

    So models whose head is the embedding keep it once. `w` is packed without rounding, and its bias
    does not join. An id outside of it raises IndexError on the CPU.
    """
    return embed(ids, w.weight, scale)
