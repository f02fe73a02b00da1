"""A projection whose inputs workers share, with adapters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.models.adapters.banks import AdapterBanks
from quire.models.layers import SharedProjection
from quire.ops.formats.lora import Bank


@dataclass(frozen=True, slots=True)
class AdaptedSharedProjection:
    """A shared projection with the bank of its adapters, of which each worker has the inputs'
    matrices that belong to its part: factors are exchanged as partial sums are.
    """

    shared: SharedProjection
    bank: Bank
    banks: AdapterBanks

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of this worker -> [T, C], the same on every worker."""
        slots = self.banks.slots
        if slots is None:
            return self.shared(x)
        group = self.shared.group
        peaks = self.shared.peaks(x)
        parts = self.shared.parts(x, peaks)
        factors = group.gather(self.shared.ops.lora_partial(x, self.bank, slots))
        inputs = [x, parts, factors, slots, *([] if peaks is None else [peaks])]
        return group.apply(self._total, inputs, parts.shape[-1])

    def _total(
        self, x: Tensor, parts: Tensor, factors: Tensor, slots: Tensor, peaks: Tensor | None = None
    ) -> Tensor:
        ops, weight = self.shared.ops, self.shared.weight
        addend = ops.lora_total(factors.flatten(1, 2), self.bank, slots)
        total: Tensor = ops.linear_total(parts, weight, peaks, x.dtype, addend)
        return total
