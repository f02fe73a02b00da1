"""Codes that products do not take: a weight becomes plain numbers while it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError
from quire.models.formats.storage import CodeLayout
from quire.models.loading.codes.flattened_codes import Parts
from quire.ops.formats.tables import E2M1
from quire.ops.fp8 import FP8

_IN_WORD = 10
"""Codes of three bits in a word of HQQ."""


def widened_weight(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> Tensor:
    """The weight [out, in] in fp32. Raises LoadError and CorruptCheckpoint with the module."""
    group, are_flat = layout.group, layout.packing.startswith("hqq")
    if group is not None and inputs % group and not are_flat:
        raise LoadError(f"{module} has {inputs} inputs, which groups of {group} do not divide.")
    for name, part in parts.items():
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise CorruptCheckpoint(f"{module}.{name} has a number that is not finite.")
    return _WIDEN[layout.packing](layout, module, parts, inputs)


def _mlx(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> Tensor:
    """code * scale + bias."""
    wide = _codes(parts["weight"], layout.bits, inputs).unflatten(1, (-1, layout.group or inputs))
    return wide.mul_(_of_groups(parts["scales"])).add_(_of_groups(parts["biases"])).flatten(1)


def _mlx_floats(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> Tensor:
    """Numbers in e2m1 or e4m3 times scales, powers of two or with groups of 16 in e4m3."""
    if layout.bits == 4:
        numbers = torch.tensor(E2M1)[_codes(parts["weight"], 4, inputs).long()]
    else:
        numbers = parts["weight"].view(FP8).float()
    scales = parts["scales"].view(FP8 if layout.packing == "mlx-nvfp4" else torch.float8_e8m0fnu)
    wide = numbers.unflatten(1, (-1, layout.group or inputs)).mul_(_of_groups(scales)).flatten(1)
    if not bool(wide.isfinite().all()):
        raise CorruptCheckpoint(f"{module} has NaN among its numbers or scales.")
    return wide


def _torchao_int4(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> Tensor:
    """code * scale + zero, codes of -8..7, the even input of a byte in its lower half."""
    both = parts["_weight_qdata"].view(torch.uint8)
    codes = torch.stack((both & 15, both >> 4), 2).flatten(1).view(torch.int8)
    wide = ((codes ^ 8) - 8).float().unflatten(1, (-1, layout.group or inputs))
    scales, zeros = (_of_groups(parts[f"_weight_{name}"].t()) for name in ("scale", "zero_point"))
    return wide.mul_(scales).add_(zeros).flatten(1)


def _hqq(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> Tensor:
    """(code - zero) * scale of the flattened weight, whose groups are rows, or with axis 0 columns.
    The parts of a byte or a word are of rows that lie far apart.
    """
    _check_state(layout, module, parts, inputs)
    stored, scales, zeros = (parts[name] for name in ("W_q", "scale", "zero"))
    bits, per = layout.bits, _IN_WORD if layout.bits == 3 else 8 // layout.bits
    mask = (1 << bits) - 1
    fields = [(stored >> bits * (per - 1 - i)) & mask for i in range(per)]
    codes = torch.cat(fields).float()
    if layout.packing == "hqq":
        codes = codes[: len(scales)]  # words of three bits are filled up
    elif layout.group is not None:
        codes = codes[: layout.group]
    wide = (codes - zeros.float()).mul_(scales.float())
    return wide.reshape(-1, inputs)


def _check_state(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> None:
    """Raise CorruptCheckpoint where a module of HQQ says other numbers than the config."""
    outputs = parts["scale"].numel() * (layout.group or inputs) // inputs
    expected = {"nbits": layout.bits, "axis": int(layout.packing == "hqq")}
    expected |= {} if layout.group is None else {"group_size": layout.group}
    for key, value in expected.items():
        if key in parts and int(parts[key]) != value:
            raise CorruptCheckpoint(
                f"{module}.{key} is {int(parts[key])}, and config.json says {value}."
            )
    if "shape" in parts and parts["shape"].tolist() != [outputs, inputs]:
        raise CorruptCheckpoint(
            f"{module}.shape is {parts['shape'].tolist()}, but its codes are of [{outputs}, "
            f"{inputs}]."
        )


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


_WIDEN: Mapping[str, Callable[[CodeLayout, str, Parts, int], Tensor]] = {
    "mlx": _mlx,
    **dict.fromkeys(("mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8"), _mlx_floats),
    "torchao-int4": _torchao_int4,
    "hqq": _hqq,
    "hqq-axis0": _hqq,
}
