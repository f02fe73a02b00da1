"""The control methods of a core that concern LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from quire.engine.core.features import CoreFeature
from quire.engine.core.features.adapters import AdapterStore
from quire.engine.wire.messages import AdapterRef
from quire.errors import RequestError
from quire.lora.request import ADAPTERS_ARE_OFF


class AdapterVerbs:
    """They are answered by the core's feature; without it they are refused."""

    features: Sequence[CoreFeature]

    @property
    def adapters(self) -> AdapterStore | None:
        return next((each for each in self.features if isinstance(each, AdapterStore)), None)

    def check_lora(self, folder: str) -> None:
        """Raise RequestError for an adapter that cannot be used, before its values are read."""
        self._require_adapters().check(folder)

    def add_lora(self, name: str, lora_id: int, folder: str, again: bool = False) -> Future[bool]:
        """Read an adapter into host memory; `again`: even if its files look the same."""
        return self._require_adapters().add(AdapterRef(name, lora_id, folder), again=again)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; False if the id is unknown."""
        return self._require_adapters().remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory and its slot. Raises InvalidParameter where that cannot be."""
        self._require_adapters().pin(lora_id)
        return True

    def list_loras(self) -> list[int]:
        """Return the ids of the adapters that are in memory, in ascending order."""
        return [] if self.adapters is None else sorted(self.adapters.ids())

    def _require_adapters(self) -> AdapterStore:
        if self.adapters is None:
            raise RequestError(ADAPTERS_ARE_OFF, parameter="lora_request")
        return self.adapters
