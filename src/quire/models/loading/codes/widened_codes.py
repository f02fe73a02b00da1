"""Codes that products do not take: a weight becomes plain numbers while it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError
from quire.models.formats.storage import CodeLayout
from quire.models.loading.codes.flattened_codes import Parts


def widened_weight(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> Tensor:
    """The weight [out, in] of a module with these tensors in fp32: code * scale + bias. Raises
    LoadError and CorruptCheckpoint, which name the module.
    """
    group = layout.group
    assert group is not None, "all packings of this kind have groups"
    if inputs % group:
        raise LoadError(f"{module} has {inputs} inputs, which groups of {group} do not divide.")
    for name in ("scales", "biases"):
        if not bool(parts[name].isfinite().all()):
            raise CorruptCheckpoint(f"{module}.{name} has a number that is not finite.")
    wide = _codes(parts["weight"], layout.bits, inputs).unflatten(1, (-1, group))
    return wide.mul_(_of_groups(parts["scales"])).add_(_of_groups(parts["biases"])).flatten(1)


def _of_groups(part: Tensor) -> Tensor:
    return part.float().unsqueeze(2)


def _codes(words: Tensor, bits: int, inputs: int) -> Tensor:
    """uint32 [out, W] -> fp32 [out, in]: eight codes lie in `bits` bytes, the first in the lowest
    bits, and may run over the ends of words.
    """
    stored = words.view(torch.uint8)[:, : inputs * bits // 8].unflatten(1, (-1, bits))
    eight = torch.zeros(stored.shape[:2], dtype=torch.int64)
    for i in range(bits):
        eight |= stored[..., i].long() << 8 * i
    codes = torch.empty(*eight.shape, 8, dtype=torch.float32)
    mask = (1 << bits) - 1
    for i in range(8):
        codes[..., i] = (eight >> bits * i) & mask
    return codes.flatten(1)
