"""From panels of packed weights back to rows; csrc/kernels/linear_pack.cpp and quantized.cpp say
how panels look.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_LANES = 16


def plain_rows(panels: Tensor, out: int, in_features: int, *, gated: bool) -> Tensor:
    """Rows [out, in] of a weight in the model's type, whose panels are [P, in / 2, 2 * width]."""
    count, pairs, line = panels.shape
    if panels.dtype is torch.bfloat16:
        rows = panels.view(count, pairs, line // 2, 2).transpose(1, 2)
    else:
        rows = panels.view(count, pairs, 2, line // 2).permute(0, 3, 1, 2)
    return _in_order(rows.reshape(count, line // 2, -1), out, gated)[:, :in_features].contiguous()


def byte_rows(panels: Tensor, out: int, in_features: int, *, gated: bool) -> Tensor:
    """Whole numbers [out, in] int8 of a weight in int8, whose panels are [P, in / 4, 4 * width]."""
    count, fours, line = panels.shape
    rows = panels.view(count, fours, line // 4, 4).transpose(1, 2).reshape(count, line // 4, -1)
    numbers = _in_order(rows, out, gated)[:, :in_features]
    return (numbers.to(torch.int16) - 128).to(torch.int8)


def nibble_rows(
    panels: Tensor, group: int, out: int, in_features: int, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """Whole numbers [out, in] int8 and scales [out, groups] of a weight in int4."""
    count, groups, _ = panels.shape
    half = group * _LANES
    pairs = panels[..., :half].reshape(count, groups, group // 4, _LANES, 4)
    pairs = pairs.permute(0, 3, 1, 2, 4).reshape(count, _LANES, -1)
    numbers = torch.cat((pairs & 15, pairs >> 4), 1)
    scales = panels[..., half:].contiguous().view(torch.bfloat16).transpose(1, 2)
    rows = _in_order(numbers, out, gated)[:, :in_features]
    return (rows.to(torch.int16) - 8).to(torch.int8), _in_order(scales, out, gated)


def in_order(values: Tensor, out: int, *, gated: bool, width: int) -> Tensor:
    """One value of each output, from the order of the panels."""
    return _in_order(values.view(-1, width, 1), out, gated)[:, 0]


def named(
    weight: Tensor, scales: Tensor | None, bias: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are there, with the ends of their names."""
    for name, tensor in (("weight", weight), ("weight_scale", scales), ("bias", bias)):
        if tensor is not None:
            yield name, tensor


def _in_order(panels: Tensor, out: int, gated: bool) -> Tensor:
    """[P, width, *] -> [out, *]; panels of a gated weight's halves take turns."""
    halves = 2 if gated else 1
    rows = panels.unflatten(0, (-1, halves)).transpose(0, 1).flatten(1, 2)
    return rows[:, : out // halves].flatten(0, 1)
