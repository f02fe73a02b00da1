"""The places in a model that the rows of a checkpoint's tensor go to as they are, so that they can
be written one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.models.loading.model_parts import Part

_CACHED_BYTES = 4 << 20
"""Bytes of rows that caches keep between two places that they are written to."""


class RowWriter(Protocol):
    """A provider's way to new values for some rows of a weight that it has packed, or of a large
    tensor.
    """

    bias: Tensor | None

    def write(self, first: int, rows: Tensor, *, is_slice: bool) -> bool:
        """Pack rows [n, in] of the weight's type from output `first` on; returns whether they have
        NaN. is_slice: others follow, which a process of this machine is about to bring.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The rows of a part, or of its bias, from `first` on."""

    part: str
    first: int
    is_bias: bool = False


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Places by the name of the stored tensor that has their rows, and the leaves of each part that
    has such places, with the tensors' names.
    """

    of_tensor: Mapping[str, Sequence[RowPlace]]
    of_part: Mapping[str, Mapping[str, str]]


class RowTarget:
    """The places of one tensor."""

    def __init__(
        self,
        dtype: torch.dtype,
        packed: Sequence[tuple[RowWriter, int]],
        plain: Sequence[tuple[Tensor, int]],
    ) -> None:
        """dtype: of packed weights. Each place is a weight or a tensor and its row that the first
        one of the tensor becomes.
        """
        self._dtype = dtype
        self._packed, self._plain = packed, plain

    @property
    def looks(self) -> bool:
        """Whether `write` tells of NaN."""
        return bool(self._packed)

    def write(self, first: int, rows: Tensor, *, is_slice: bool) -> bool:
        """Write rows from number `first` of the tensor on; returns whether they were seen to have
        NaN.
        """
        count = _CACHED_BYTES * rows.shape[0] // max(1, rows.nbytes)
        if len(self._packed) + len(self._plain) > 1 and 0 < count < rows.shape[0]:
            # from memory once, for all places
            found = [
                self.write(first + i * count, part, is_slice=is_slice)
                for i, part in enumerate(rows.split(count))
            ]
            return any(found)
        for tensor, at in self._plain:
            tensor[at + first : at + first + rows.shape[0]].copy_(rows)
        has_nan = False
        if self._packed and rows.dtype is not self._dtype:
            rows = rows.to(self._dtype)
        for weight, at in self._packed:
            has_nan |= weight.write(at + first, rows, is_slice=is_slice)
        return has_nan


def target_of(
    places: Sequence[RowPlace],
    parts: Mapping[str, Part],
    writers: Mapping[str, RowWriter | None],
    dtype: torch.dtype,
) -> RowTarget | None:
    """The target that these places are; None where one of them cannot be written by rows. `writers`
    has those of parts that a provider writes.
    """
    packed: list[tuple[RowWriter, int]] = []
    plain: list[tuple[Tensor, int]] = []
    for place in places:
        part, writer = parts.get(place.part), writers.get(place.part)
        if isinstance(part, Tensor):
            if writer is None or part.dtype is not dtype:
                plain.append((part, place.first))
            else:
                packed.append((writer, place.first))
            continue
        if writer is None or (place.is_bias and writer.bias is None):
            return None
        if place.is_bias:
            assert writer.bias is not None, "looked at above"
            plain.append((writer.bias, place.first))
        else:
            packed.append((writer, place.first))
    return RowTarget(dtype, packed, plain)
