"""Weight rules applied to tensors: a stored tensor to its leaves (views of it) and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.models.rules import StoredTensor
from quire.ops import CodedWeight


def to_leaves(stored: StoredTensor, tensor: Tensor) -> list[Tensor]:
    """The leaves in `tensor`, in the order of `stored.leaves`; views, so nothing is read yet, but
    copies where several heads are divided.
    """
    if "scalar" in stored.steps:
        return [tensor.view(1)]
    for _ in range(stored.steps.count("row")):
        tensor = tensor[0]
    if "boxed" in stored.steps:
        tensor = tensor[0, 0, :, 0]
    if "joined" in stored.steps:
        tensor = tensor.unflatten(0, (_num_experts(stored), -1))
    if "transpose" in stored.steps:
        tensor = tensor.transpose(-1, -2)
    if "stacked" not in stored.steps:
        return _divide(stored, tensor)
    per_expert = [_divide(stored, expert) for expert in tensor]
    return [leaf for part in zip(*per_expert, strict=True) for leaf in part]


def coded_leaves(stored: StoredTensor, weight: CodedWeight) -> list[CodedWeight]:
    """The leaves in a weight of codes, as views."""

    def leaves_of(part: Tensor) -> list[Tensor]:
        return to_leaves(stored, part.unflatten(0, stored.shape[:-1]))

    codes, scales = leaves_of(weight.codes), leaves_of(weight.scales)
    zeros = [None] * len(codes) if weight.zeros is None else leaves_of(weight.zeros)
    return [
        replace(weight, codes=c, scales=s, zeros=z)
        for c, s, z in zip(codes, scales, zeros, strict=True)
    ]


def from_leaves(stored: StoredTensor, leaves: Sequence[Tensor]) -> Tensor:
    """The inverse of `to_leaves`: a new tensor as the checkpoint stores it."""
    if "scalar" in stored.steps:
        return leaves[0].view(())
    if "stacked" in stored.steps:
        experts = _num_experts(stored)
        tensor = torch.stack([_combine(stored, leaves[e::experts]) for e in range(experts)])
    else:
        tensor = _combine(stored, leaves)
    if "transpose" in stored.steps:
        tensor = tensor.transpose(-1, -2)
    if "joined" in stored.steps:
        tensor = tensor.flatten(0, 1)
    if "boxed" in stored.steps:
        tensor = tensor[None, None, :, None]
    for _ in range(stored.steps.count("row")):
        tensor = tensor[None]
    return tensor.contiguous()


def _num_experts(stored: StoredTensor) -> int:
    """The number of experts in a tensor that holds all of them."""
    return len(stored.leaves) if "joined" in stored.steps else stored.shape[0]


def _num_groups(stored: StoredTensor) -> int:
    if "by_quarter" in stored.steps:
        return 4
    return min(leaf.heads for leaf in stored.leaves) if "by_head" in stored.steps else 1


def _divide(stored: StoredTensor, tensor: Tensor) -> list[Tensor]:
    parts = len(stored.leaves) // (_num_experts(stored) if "stacked" in stored.steps else 1)
    if "deal" in stored.steps:
        return [tensor[i::parts] for i in range(parts)]
    first_of_each = stored.leaves[:: len(stored.leaves) // parts]
    groups = _num_groups(stored)
    sizes = [leaf.shape[0] // groups for leaf in first_of_each]
    pieces = tensor.unflatten(0, (groups, -1)).split(sizes, 1)
    return [piece.flatten(0, 1) for piece in pieces]


def _combine(stored: StoredTensor, parts: Sequence[Tensor]) -> Tensor:
    if "deal" in stored.steps:
        return torch.stack(list(parts), dim=1).flatten(0, 1)
    groups = _num_groups(stored)
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
