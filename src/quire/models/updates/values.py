"""A look at the values of tensors that have come: whether they are numbers, and whether two are the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import LoadError
from quire.models.updates.old_memory import WeightWriter

_PIECE_BYTES = 256 << 10
"""Bytes that a provider adds up by themselves: sums of a tensor are those of its pieces."""
_LINE = 4096
"""Bytes of a line of a fingerprint."""


def check_values(writer: WeightWriter, name: str, tensor: Tensor) -> None:
    """Raise LoadError for NaN."""
    found = writer.look_at(tensor, adds_up=False)
    if has_nan(tensor) if found is None else found[0]:
        raise LoadError(f"{name} has NaN among its values.")


class Fingerprint:
    """Numbers that differ for tensors that do, but for chance: a copy would take their memory. They
    do not depend on how a tensor is cut into rows.
    """

    def __init__(self, writer: WeightWriter, name: str) -> None:
        """`name`: the tensor's, in errors."""
        self._writer, self._name = writer, name
        self._rest: Tensor | None = None
        """Values after the last whole piece."""
        self._sums: list[int] = []

    def add(self, rows: Tensor) -> None:
        """Look at the next rows, or all of them. Raises LoadError for NaN."""
        values = rows.contiguous().reshape(-1)
        if self._rest is not None:
            values = torch.cat((self._rest, values))
        unit = _PIECE_BYTES // values.element_size()
        end = len(values) // unit * unit
        self._look_at(values[:end])
        # a copy: the memory of rows is used again
        self._rest = values[end:].clone() if end < len(values) else None

    def close(self) -> tuple[int, ...]:
        """The numbers of all rows. Raises LoadError for NaN."""
        if self._rest is not None:
            self._look_at(self._rest)
        return tuple(self._sums)

    def _look_at(self, values: Tensor) -> None:
        if not len(values):
            return
        found = self._writer.look_at(values, adds_up=True)
        is_refused, sums = (has_nan(values), _sums(values)) if found is None else found
        if is_refused:
            raise LoadError(f"{self._name} has NaN among its values.")
        self._sums += sums


def _sums(values: Tensor) -> list[int]:
    data = values.view(torch.uint8)
    end = len(data) // _LINE * _LINE
    lines = data[:end].view(torch.int64).view(-1, _LINE // 8)
    sums = []
    for each in (lines.sum(0), lines.sum(1)):  # as numbers of 64 bits, without a wider copy
        places = torch.arange(1, len(each) + 1, device=each.device)
        sums.append(int((each * places).sum()))
    return [*sums, *data[end:].tolist()]


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor has NaN. Its sum says that it has none, in the time of a copy."""
    if not tensor.is_floating_point():
        return False
    if tensor.element_size() == 1:
        # torch does not add up floats of 8 bits
        tensor = tensor.float()
    # infinities of both signs have such a sum, too
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
