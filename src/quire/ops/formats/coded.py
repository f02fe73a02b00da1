"""Weights that a checkpoint stores as codes, and products with them.

A weight is (code - zero point) * scale, with one scale, and perhaps one zero point, for every
output and group of inputs. That is what AWQ, GPTQ and compressed-tensors store, packed in different
ways (`models/loading/codes/code_layouts.py` unpacks them). Weights keep their values: differences
of codes are whole numbers, and their products with scales of 16 bits are exact in fp32. Codes may
be 8-bit floats, too, which are the numbers themselves, or stand for sixteen numbers of a table, as
those of 4-bit floats do. Activations keep their values unless the format rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.formats.row_rounding import RowRounding
from quire.ops.fp8 import FP8
from quire.ops.quantized import QuantizedLinear
from quire.ops.segments import Addend, add_to_rows, multiply, products

NIBBLE_GROUPS = (32, 64, 128)
"""Groups of `WeightFormat("int4")`."""
_PIECE = 1 << 24
"""Weights that are widened at once."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] of codes of four or eight bits.

    codes: uint8 [out, in], or [out, ceil(in / 2)] of four bits, the even input of a byte in its
    lower half. scales [out, G] of any float dtype, a scale for every `group` inputs; of the last
    group there may be fewer. zeros: uint8 [out, G], or None: the middle of the codes, 8 or 128.
    order [in] int64: the weight's input i is the model's input order[i]; None where they are the
    same. are_floats: codes are numbers of e4m3, without zero points. rounding: of activations, None
    where they keep their values; the inputs are in the model's order then. table: the numbers that
    codes of four bits stand for, without zero points; None: themselves.
    """

    bits: Literal[4, 8]
    in_features: int
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    are_floats: bool = False
    rounding: RowRounding | None = None
    table: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert not self.are_floats or (self.bits == 8 and self.zeros is None)
        assert self.table is None or (self.bits == 4 and self.zeros is None)
        assert self.rounding is None or self.order is None
        groups = -(-self.in_features // self.group)
        outputs, scale_groups = self.scales.shape
        assert scale_groups == groups
        assert self.codes.shape == (outputs, -(-self.in_features * self.bits // 8))
        assert self.zeros is None or self.zeros.shape == (outputs, groups)

    @property
    def out_features(self) -> int:
        return len(self.scales)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def unit(self) -> int:
        """Inputs that stay together where the weight is cut; 0: any may be cut off."""
        if self.is_of_integers:
            return 0
        rounded = 0 if self.rounding is None else self.rounding.group
        return math.lcm(self.group, rounded or 1)

    @property
    def needs_peaks(self) -> bool:
        """Whether a part of a row of activations cannot be rounded by itself."""
        return self.rounding is not None and self.rounding.needs_peaks

    @property
    def is_of_integers(self) -> bool:
        """Whether a product is a sum of whole numbers times one scale of the row and one of the
        output, as those of `WeightFormat("int8")` are.
        """
        has_one_scale = self.bits == 8 and self.group >= self.in_features and self.zeros is None
        return has_one_scale and not self.are_floats and self.rounding == RowRounding("int8")

    def as_nibbles(self) -> CodedWeight | None:
        """The same weight, in groups of `WeightFormat("int4", group)`, where a product with it is
        one of that format: of whole numbers of -8..7 with scales in bfloat16, and of rows that are
        rounded to int8. None for other weights.
        """
        is_whole = self.zeros is None and self.table is None
        if self.bits != 4 or not is_whole or self.scales.dtype is not torch.bfloat16:
            return None
        is_one = self.group >= self.in_features
        groups = (g for g in NIBBLE_GROUPS if g == self.group or (is_one and g >= self.in_features))
        group = next(groups, None)
        if group is None or self.rounding != RowRounding("int8"):
            return None
        return replace(self, group=group)

    def widened(self) -> Tensor:
        """The weight [out, in] in fp32, inputs in the model's order."""
        numbers, scales = self._numbers(), self._spread(self.scales.float())
        if self.are_floats:
            weight = numbers.view(FP8).float() * scales
        elif self.table is not None:
            weight = torch.tensor(self.table, device=numbers.device)[numbers.long()] * scales
        else:
            weight = (numbers.float() - self._spread(self._zeros().float())) * scales
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def each(self, change: Callable[[Tensor], Tensor]) -> CodedWeight:
        """The weight with all tensors but the order changed."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)

    def fits(self, other: CodedWeight) -> bool:
        """Whether the other's outputs can follow in the same weight."""
        if self._kind() != other._kind() or not _fit(self.rounding, other.rounding):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def rows(self, start: int, length: int) -> CodedWeight:
        """Some of the outputs, as views."""
        return self.each(lambda part: part.narrow(0, start, length))

    def columns(self, start: int, length: int) -> CodedWeight:
        """Some of the inputs, whole units from `start` on and up to the end of one, as views."""
        assert self.order is None, "inputs that are reordered do not lie side by side"
        codes = self.codes.narrow(1, start * self.bits // 8, length * self.bits // 8)
        if not self.unit:
            return replace(self, in_features=length, group=length, codes=codes)
        assert start % self.unit == 0 and length % self.unit == 0
        first, count = start // self.group, length // self.group
        return replace(
            self,
            in_features=length,
            codes=codes,
            scales=self.scales.narrow(1, first, count),
            zeros=None if self.zeros is None else self.zeros.narrow(1, first, count),
        )

    def with_group(self, group: int) -> CodedWeight:
        """The weight with smaller groups, some of which have equal scales."""
        if group == self.group:
            return self
        assert self.group % group == 0 or len(self.scales[0]) == 1
        count, times = -(-self.in_features // group), -(-self.group // group)

        def repeated(part: Tensor) -> Tensor:
            return part.repeat_interleave(times, 1)[:, :count]

        zeros = None if self.zeros is None else repeated(self.zeros)
        return replace(self, group=group, scales=repeated(self.scales), zeros=zeros)

    def scaled(self, factor: float) -> CodedWeight:
        return self if factor == 1.0 else replace(self, scales=self.scales.float() * factor)

    def reordered(self, order: Tensor) -> CodedWeight:
        """The same codes and groups, of which input i is now the model's input order[i]: `codes`
        are permuted so that the groups, which were of inputs order[0], order[1], ..., are of
        neighbours.
        """
        numbers = self._numbers()[:, order]
        if self.bits == 4:
            packed = numbers[:, 0::2].contiguous()
            packed[:, : self.in_features // 2] |= numbers[:, 1::2] << 4
            numbers = packed
        return replace(self, codes=numbers, order=order)

    def _kind(self) -> tuple[object, ...]:
        return self.bits, self.in_features, self.group, self.are_floats, self.table

    def _spread(self, part: Tensor) -> Tensor:
        """part [out, G] for each input, [out, in]."""
        return part.repeat_interleave(self.group, 1)[:, : self.in_features]

    def _numbers(self) -> Tensor:
        """The codes [out, in]."""
        if self.bits == 8:
            return self.codes
        both = torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)
        return both[:, : self.in_features]

    def _zeros(self) -> Tensor:
        if self.zeros is not None:
            return self.zeros
        return torch.full_like(self.scales, 1 << (self.bits - 1), dtype=torch.uint8)


def _fit(one: RowRounding | None, other: RowRounding | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.joined(other) is not None


def of_one_kind(weights: Sequence[CodedWeight]) -> list[CodedWeight]:
    """The same weights, all with zero points where one has some."""
    if not any(weight.zeros is not None for weight in weights):
        return list(weights)
    return [replace(weight, zeros=weight._zeros()) for weight in weights]


def one_above_the_other(parts: Sequence[CodedWeight]) -> CodedWeight:
    """Weights that fit each other as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    rounding = first.rounding
    for part in parts[1:]:
        if rounding is not None and part.rounding is not None:
            rounding = rounding.joined(part.rounding)
    has_zeros = any(part.zeros is not None for part in parts)
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part._zeros() for part in parts]) if has_zeros else None,
        rounding=rounding,
    )


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """Plain torch's format of such a weight, and its bias [out] or None. segments: see
    `quire.ops.segments`.
    """

    weight: CodedWeight
    bias: Tensor | None
    segments: int = 1

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    def multiply(self, x: Tensor, addend: Addend | None = None) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype: a product in fp32 with rows that may be rounded."""
        return add_to_rows(multiply(x, self), x, self, addend)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> fp32 [T, S, out] (fp64 of fp64), some outputs at a time."""
        weight, dtype = self.weight, torch.float64 if x.dtype is torch.float64 else torch.float32
        x = x.to(dtype) if weight.rounding is None else weight.rounding.rounded(x, peaks).to(dtype)
        step = max(1, _PIECE // max(1, self.in_features))
        if weight.order is not None:  # the segments are of the weight's own order
            x, weight = x[:, weight.order], replace(weight, order=None)
        pieces = [
            weight.rows(start, min(step, self.out_features - start))
            for start in range(0, self.out_features, step)
        ]
        parts = [products(x, piece.widened().to(x.dtype), self.segments) for piece in pieces]
        return torch.cat(parts, 2)

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """total [T, out] plus bias."""
        return total if self.bias is None else total + self.bias


def nibble_linear(weight: CodedWeight, bias: Tensor | None, segments: int = 1) -> QuantizedLinear:
    """Plain torch's format of what `as_nibbles` returns."""
    numbers = weight._numbers().to(torch.int8) - 8
    padded = F.pad(numbers, (0, -weight.in_features % weight.group))
    q, scales = padded.unflatten(1, (-1, weight.group)), weight.scales.float()
    return QuantizedLinear(weight.in_features, q, scales, bias, weight.group, True, segments)


def integer_linear(weight: CodedWeight, bias: Tensor | None, segments: int = 1) -> QuantizedLinear:
    """Plain torch's format of a weight that `is_of_integers`."""
    # turning the highest bit of a byte takes 128 from it
    q = (weight.codes ^ 128).view(torch.int8).unsqueeze(1)
    scales = weight.scales.float()
    return QuantizedLinear(weight.in_features, q, scales, bias, segments=segments)
