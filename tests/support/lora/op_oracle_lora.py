"""The oracle of low-rank adapters: a row, a part, a number at a time; and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from quire.ops.formats.lora import LoraPart, LoraShape
from tests.support.op_oracle_rows import Array, to_array, to_tensor
from tests.support.running_error import Approx, contract

exact = Approx.exact


@dataclass
class OracleBank:
    """Slot -> for each part its A [r, in] and its B [out, r], with zeros where an output is not of
    the part; None: it adds nothing.
    """

    shape: LoraShape
    slots: dict[int, list[tuple[Array, Array] | None]] = field(default_factory=dict)

    def pairs(self, slot: int) -> list[tuple[Array, Array]]:
        return [pair for pair in self.slots.get(slot, []) if pair is not None]

    def added(self, slot: int, x: Array) -> Array:
        total = np.zeros(self.shape.out_features)
        for a, b in self.pairs(slot):
            total += b @ np.array([sum(x * row) for row in a])
        return total

    def approx(self, slot: int, x: Approx) -> Approx:
        """The same of x [1, in], with the error of sums."""
        total = exact(np.zeros((1, self.shape.out_features)))
        for a, b in self.pairs(slot):
            factors = contract("ti,ri->tr", x, exact(a), a.shape[1])
            total = total + contract("tr,or->to", factors, exact(b), a.shape[0])
        return total


@dataclass
class OracleAddend:
    """What `rows` (index of a row -> its slot's matrices) add to a product of x [T, in]."""

    x: Array
    bank: OracleBank
    slots: list[int]

    def of(self, token: int) -> Array:
        return self.bank.added(self.slots[token], self.x[token])

    def approx(self) -> Approx:
        """The same for all rows, with the error of sums."""
        total = exact(np.zeros((len(self.x), self.bank.shape.out_features)))
        for token, slot in enumerate(self.slots):
            added = self.bank.approx(slot, exact(self.x[token : token + 1]))
            total.value[token], total.error[token] = added.value[0], added.error[0]
        return total


def allocate_lora(shape) -> OracleBank:
    return OracleBank(shape)


def load_lora(bank, slot, parts) -> None:
    bank.slots[slot] = [_pair(bank.shape, number, part) for number, part in enumerate(parts)]


def _pair(shape: LoraShape, number: int, part: LoraPart | None) -> tuple[Array, Array] | None:
    if part is None:
        return None
    a, left = to_array(part.a), list(part.b)
    b = np.zeros((shape.out_features, len(a)))
    for piece in shape.pieces:
        if piece.part == number:
            b[piece.start : piece.start + piece.size] = to_array(left.pop(0))
    return a, b


def lora(x, bank, slots) -> OracleAddend:
    return OracleAddend(to_array(x), bank, slots.tolist())


def lora_partial(x, bank, slots) -> Any:
    """The inputs themselves: `lora_total` begins anew."""
    return x


def lora_total(parts, bank, slots) -> OracleAddend:
    return lora(parts, bank, slots)


def lora_embed(x, ids, bank, slots, scale=1.0) -> Tensor:
    y = to_array(x).copy()
    for token, (id_, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
        for a, b in bank.pairs(slot):
            y[token] += scale * (b @ a[:, id_])
    return to_tensor(y)
