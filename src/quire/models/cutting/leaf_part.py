"""Takes the part of a tensor that a worker has."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.cutting.sharding import LeafPart


def part_of(x: Tensor, part: LeafPart) -> Tensor:
    """The part's runs of x, next to each other; a view where there is one."""
    found = [x.narrow(part.axis, *run) for run in part.runs]
    return found[0] if len(found) == 1 else torch.cat(found, part.axis)
