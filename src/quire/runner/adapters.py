"""The adapters that a runner keeps in host memory, and which of them are in the model's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.errors import BadAdapter
from quire.models.adapters.banks import AdapterBanks
from quire.models.adapters.weights import AdapterWeights
from quire.models.decoder import DecoderModel
from quire.runner.model import RunnableModel

if TYPE_CHECKING:
    from quire.models.pooling.pooler import Pooler


class AdapterSlots:
    """Adapters by number, and by slot those that steps compute with.

    `keep` and `drop` may be called by another thread than steps.
    """

    def __init__(self, model: RunnableModel) -> None:
        assert isinstance(model, DecoderModel) and model.adapters is not None, (
            "a model without room for adapters"
        )
        self._model = model
        self._banks = model.adapters
        self._targets = model.adapters.targets
        self._kept: dict[int, AdapterWeights] = {}
        self._loaded: dict[int, AdapterWeights] = {}
        self._poolers: dict[int, Pooler] = {}

    def keep(self, adapter: AdapterWeights) -> int:
        """Keep an adapter, one copy of equal contents; returns its number. Raises BadAdapter for
        one that changes what the model has no bank for.
        """
        unknown = sorted(adapter.products.keys() - self._targets)
        if unknown:
            raise BadAdapter(f"The adapter changes {unknown[0]}, which cannot be adapted here.")
        self._kept.setdefault(adapter.number, adapter)
        return adapter.number

    def drop(self, number: int) -> None:
        """Forget an adapter, if it is kept; the slots that have it still do."""
        self._kept.pop(number, None)

    def load(self, loads: Sequence[tuple[int, int]]) -> None:
        """Put kept adapters into slots: (slot, number). Slots of a model that was loaded again get
        back what they had. Raises KeyError for a number that is not kept.
        """
        banks = self._model.adapters
        assert banks is not None, "the weights are released"
        if banks is not self._banks:
            self._refill(banks)
        for slot, number in loads:
            adapter = self._kept[number]
            if self._loaded.get(slot) is not adapter:
                self._loaded.pop(slot, None)
                self._fill(banks, slot, adapter)
                self._loaded[slot] = adapter

    def pooler(self, slot: int) -> Pooler | None:
        """The pooling head that the adapter in a slot brings; None: it leaves the model's."""
        return self._poolers.get(slot)

    def _refill(self, banks: AdapterBanks) -> None:
        for slot, adapter in self._loaded.items():
            self._fill(banks, slot, adapter)
        self._banks = banks

    def _fill(self, banks: AdapterBanks, slot: int, adapter: AdapterWeights) -> None:
        banks.load(slot, adapter)
        self._poolers.pop(slot, None)
        if adapter.head:
            own = self._model.pooler
            assert own is not None, "heads of adapters are those of models that pool"
            from quire.models.pooling.pooler import with_other_leaves

            self._poolers[slot] = with_other_leaves(own, adapter.head, banks.device)
