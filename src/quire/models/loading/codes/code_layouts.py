"""From the tensors in which a checkpoint stores a module's codes to one `CodedWeight`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import CorruptCheckpoint, UnsupportedConfigValue
from quire.models.formats.storage import FLATTENED, FOUR_BIT_FLOATS, CodeLayout
from quire.models.loading.codes.flattened_codes import Parts, check_state, unpack_flattened
from quire.ops import CodedWeight
from quire.ops.formats.row_rounding import RowRounding
from quire.ops.formats.tables import E2M1
from quire.ops.rounding import TINY

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of eight that the four bits of a word hold, from the lowest on."""
_SIGNS = -0x77777778
"""The sign bits of a word's codes of four bits: 0x88888888."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A one in each of a word's codes."""
_ROWS = torch.zeros(())
"""Stands for bitsandbytes' order of a weight's bytes."""
_FLOATS = ("floats", "torchao-fp8")
"""Packings of numbers in e4m3."""
_LARGEST_GROUP = 128
"""Largest of the groups into which one over all inputs is divided."""


def coded_weight(layout: CodeLayout, module: str, parts: Parts, inputs: int) -> CodedWeight:
    """The weight of these tensors, some as views. Raises CorruptCheckpoint for bad numbers."""
    assert layout.bits == 4 or layout.bits == 8, "products take no other codes"
    shape = parts.get("weight_shape")
    if layout.packing in FLATTENED:
        check_state(layout, module, parts, inputs)
    if layout.packing in ("torchao", "bytes"):
        _check_range(layout, module, parts)
    if bool(parts.get("weight_format", _ROWS).any()):
        allowed = "0, for rows; other orders are of old GPUs"
        raise UnsupportedConfigValue(f"{module}.weight_format is not {allowed}.")
    codes, scales, zeros = _UNPACK[layout.packing](layout, parts, inputs)
    if shape is not None and shape.tolist() != [len(scales), inputs]:
        raise CorruptCheckpoint(
            f"{module}.weight_shape is {shape.tolist()}, but its codes are of [{len(scales)}, "
            f"{inputs}]."
        )
    if not bool(scales.isfinite().all()):
        raise CorruptCheckpoint(f"{module} has a scale that is not a finite number.")
    # the middle is what absent zero points mean, and products need not read those
    if zeros is not None and bool((zeros == 1 << (layout.bits - 1)).all()):
        zeros = None
    rounding = _rounding(layout, module, parts)
    are_floats = layout.packing in _FLOATS
    if are_floats and _has_nan(codes):
        raise CorruptCheckpoint(f"{module}.weight has NaN among its numbers.")
    weight = CodedWeight(
        layout.bits,
        inputs,
        layout.group_in(inputs),
        codes,
        scales,
        zeros,
        are_floats=are_floats,
        rounding=rounding,
        table=_table(layout, parts),
    )
    if layout.group is None and not weight.is_of_integers:
        weight = weight.with_group(_divided(inputs))
    index = parts.get("g_idx", parts.get("weight_g_idx"))
    if index is None or layout.group is None:
        return weight
    return _in_order_of_groups(weight, module, index)


def _check_range(layout: CodeLayout, module: str, parts: Parts) -> None:
    """Raise CorruptCheckpoint for numbers in bytes that their bits do not hold."""
    if layout.bits == 8:
        return
    most = 1 << (layout.bits - 1)
    for name in ("_weight_qdata", "_weight_zero_point", "weight", "weight_zero_point"):
        part = parts.get(name)
        if part is not None and (int(part.min()) < -most or int(part.max()) >= most):
            raise CorruptCheckpoint(
                f"{module}.{name} has a number that is not of -{most}..{most - 1}."
            )


def _table(layout: CodeLayout, parts: Parts) -> tuple[float, ...] | None:
    """The numbers that codes stand for."""
    if layout.packing in FLATTENED:
        return tuple(parts["weight.quant_map"].tolist())
    return E2M1 if layout.packing in FOUR_BIT_FLOATS else None


def _has_nan(codes: Tensor) -> bool:
    """Whether codes of e4m3 have a NaN: all bits but the sign, in either sign."""
    return bool(codes.max() == 0xFF) or bool(codes.view(torch.int8).max() == 0x7F)


def _rounding(layout: CodeLayout, module: str, parts: Parts) -> RowRounding | None:
    rows = layout.rows
    if rows is None:
        return None
    scale = float(parts["input_scale"].float()) if rows.is_static else None
    if "input_zero_point" in parts and bool(parts["input_zero_point"].any()):
        raise CorruptCheckpoint(f"{module}.input_zero_point is not 0, as symmetric ones are.")
    if scale is not None and not TINY < scale < 1 / TINY:
        raise CorruptCheckpoint(f"{module}.input_scale is {scale:g}, which is not a scale.")
    return RowRounding("e4m3" if layout.packing in _FLOATS else "int8", rows.group, scale)


def _divided(inputs: int) -> int:
    """The size of groups that divide all inputs, and a quarter of them if possible."""
    least = math.gcd(inputs // 4, _LARGEST_GROUP) if inputs % 4 == 0 else 0
    return least if least >= 32 else _LARGEST_GROUP


def _in_order_of_groups(weight: CodedWeight, module: str, index: Tensor) -> CodedWeight:
    """index [in]: each input's group. Groups are of neighbours, so others get an order."""
    index = index.long()
    in_place = torch.arange(weight.in_features) // weight.group
    if torch.equal(index, in_place):
        return weight
    order = index.argsort(stable=True)
    if not torch.equal(index[order], in_place):
        raise CorruptCheckpoint(
            f"{module} has groups (g_idx) that are not of {weight.group} inputs each."
        )
    return weight.reordered(order)


def _unpack_compressed(
    layout: CodeLayout, parts: Parts, inputs: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words along the inputs, which are bytes in the order of a `CodedWeight`."""
    row = -(-inputs * layout.bits // 8)
    codes = parts["weight_packed"].view(torch.uint8)[:, :row]
    scales, zeros = parts["weight_scale"], None
    if layout.has_zeros:
        words = parts["weight_zero_point"].t().contiguous()
        zeros = _codes_of(words, layout.bits)[:, : len(scales)].t()
    return codes, scales, zeros


def _unpack_gptq(layout: CodeLayout, parts: Parts, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words along the inputs, but one above the other."""
    row = -(-inputs * layout.bits // 8)
    words, scales = parts["qweight"], parts["scales"]
    codes = words.t().contiguous().view(torch.uint8)[:, :row]
    stored = parts["qzeros"].contiguous()
    if layout.is_one_less:  # of whole words, as it was subtracted: a zero has borrowed
        stored = stored + _ONES[layout.bits]
    zeros = _codes_of(stored, layout.bits)[:, : scales.shape[1]]
    return codes, scales.t(), zeros.t()


def _unpack_awq(layout: CodeLayout, parts: Parts, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words along the outputs, whose outputs are shuffled."""
    words, zeros = parts["qweight"].contiguous(), parts["qzeros"].contiguous()
    codes, spread = _along_outputs(words, zeros, inputs, _AWQ_COLUMNS)
    return codes, parts["scales"].t(), spread


def _unpack_quark(
    layout: CodeLayout, parts: Parts, inputs: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Words along the outputs, in AWQ's order or their own; signed codes are turned into others."""
    words, zeros = parts["weight"].contiguous(), parts.get("weight_zero_point")
    has_zeros = zeros is not None
    zeros = zeros.contiguous() if zeros is not None else torch.zeros_like(words[:1])
    if layout.is_signed:  # q + 8 is q with the other sign bit
        words, zeros = words ^ _SIGNS, zeros ^ _SIGNS
    columns = _AWQ_COLUMNS if layout.packing == "quark-int4" else tuple(range(8))
    codes, spread = _along_outputs(words, zeros, inputs, columns)
    scales = parts["weight_scale"].t()
    count = len(scales)
    return codes[:count], scales, spread[:count] if has_zeros else None


def _along_outputs(
    words: Tensor, zeros: Tensor, inputs: int, columns: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """int32 [in, out / 8] and [G, out / 8], whose four bits hold the outputs in this order -> codes
    of a `CodedWeight`, and zero points.
    """
    words = words.view(torch.uint8)
    even, odd = words[0::2], words[1::2]
    if inputs % 2:
        odd = F.pad(odd, (0, 0, 0, 1))
    pairs = (even & 15) | (odd << 4), (even >> 4) | (odd & 240)  # of an output's inputs
    across = [both.view(torch.int32).t().contiguous().view(torch.uint8) for both in pairs]
    codes = torch.empty(words.shape[1] // 4, 8, len(even), dtype=torch.uint8)
    for i, column in enumerate(columns):
        codes[:, column] = across[i % 2][:, i // 2 :: 4]
    spread = _codes_of(zeros, 4).unflatten(1, (-1, 8))
    return codes.flatten(0, 1), spread[..., torch.tensor(columns).argsort()].flatten(1).t()


def _unpack_bytes(
    layout: CodeLayout, parts: Parts, inputs: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A byte for each weight; blocks of outputs share scales, which may be exponents of two."""
    codes, scales = parts["weight"].view(torch.uint8), parts[layout.scale_name]
    middle = 1 << (layout.bits - 1)
    if scales.dtype in (torch.float8_e8m0fnu, torch.uint8):
        scales = _powers_of_two(scales.view(torch.uint8))
    if layout.packing != "floats":  # whole numbers around 0 as codes around the middle
        codes = _around_middle(codes.view(torch.int8), layout.bits)
    if layout.packing == "bitsandbytes-int8":
        scales = scales.float() / 127  # they are the largest magnitudes
    together = layout.outputs or len(codes)
    scales = scales.reshape(-(-len(codes) // together), -1)
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = (zeros.reshape(scales.shape).int() + middle).to(torch.uint8)
        zeros = zeros.repeat_interleave(together, 0)[: len(codes)]
    return codes, scales.repeat_interleave(together, 0)[: len(codes)], zeros


def _unpack_torchao(
    layout: CodeLayout, parts: Parts, inputs: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A byte for each weight: e4m3, or whole numbers around 0; up to four bits are packed."""
    numbers, zeros = parts["_weight_qdata"], parts.get("_weight_zero_point")
    count = len(numbers)
    scales = parts["_weight_scale"]
    scales = scales.expand(count, scales.shape[1])
    if layout.packing == "torchao-fp8":
        return numbers.view(torch.uint8), scales, None
    middle, codes = 1 << (layout.bits - 1), _around_middle(numbers, layout.bits)
    if zeros is None:
        return codes, scales, None
    return codes, scales, (zeros.short() + middle).to(torch.uint8).expand(count, -1)


def _around_middle(numbers: Tensor, bits: int) -> Tensor:
    """int8 [out, in], whole numbers around 0 -> the codes of a `CodedWeight`."""
    if bits == 8:
        return numbers.view(torch.uint8) ^ 128
    padded = F.pad(numbers, (0, numbers.shape[1] % 2)).view(torch.uint8) ^ 8
    return (padded[:, ::2] & 15) | (padded[:, 1::2] << 4)


def _unpack_four_bit_floats(
    layout: CodeLayout, parts: Parts, inputs: int
) -> tuple[Tensor, Tensor, None]:
    """Bytes in a `CodedWeight`'s order; scales are exponents, or of 8 bits with one factor."""
    where = FOUR_BIT_FLOATS[layout.packing]
    codes, scales = parts[where.codes].view(torch.uint8), parts[where.scales]
    scales = scales.view(-1, layout.groups(inputs))
    codes = codes.reshape(len(scales), -1)[:, : -(-inputs // 2)]
    if where.factor is None:
        return codes, _powers_of_two(scales.view(torch.uint8)), None
    factor, wide = parts[where.factor].float().view(()), scales.float()
    return codes, wide / factor if where.divides else wide * factor, None


def _powers_of_two(exponents: Tensor) -> Tensor:
    """uint8 [*] with a bias of 127 -> bfloat16 [*], exactly; 255 is not finite."""
    bits = exponents.to(torch.int16) << 7
    # 2^-127 has no exponent in bfloat16, but the first bit of the fraction
    return bits.masked_fill_(exponents == 0, 1 << 6).view(torch.bfloat16)


def _codes_of(words: Tensor, bits: int) -> Tensor:
    """int32 [*, W] -> uint8 [*, W * 32 / bits], the lowest bits first."""
    found = words.view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(-2)


_UNPACK: Mapping[str, Callable[[CodeLayout, Parts, int], tuple[Tensor, Tensor, Tensor | None]]] = {
    "awq": _unpack_awq,
    "gptq": _unpack_gptq,
    "compressed-tensors": _unpack_compressed,
    "bytes": _unpack_bytes,
    "floats": _unpack_bytes,
    "bitsandbytes-int8": _unpack_bytes,
    "quark-int4": _unpack_quark,
    "quark-int4-order": _unpack_quark,
    "torchao": _unpack_torchao,
    "torchao-fp8": _unpack_torchao,
    **dict.fromkeys(FLATTENED, unpack_flattened),
    **dict.fromkeys(FOUR_BIT_FLOATS, _unpack_four_bit_floats),
}
