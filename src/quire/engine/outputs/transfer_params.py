"""Words of the K/V connector about a request that has ended, for its last output."""

from __future__ import annotations

from typing import Any

from quire.engine.outputs.kept_part import KeptPart, PartKind, SharedOutput
from quire.step.columns import TransferParams


class OutputTransferParams(KeptPart):
    """The `kv_transfer_params` of a completion."""

    __slots__ = ("_params",)

    def __init__(self) -> None:
        self._params: dict[str, Any] | None = None

    def add(self, part: TransferParams) -> None:
        self._params = part.params

    def join(self, shared: SharedOutput) -> None:
        """Give them to the request, unless an earlier completion of it has given its own."""
        if self._params is not None and shared.kv_transfer_params is None:
            shared.kv_transfer_params = self._params


TRANSFER_PARAMS = PartKind(TransferParams, lambda *_: OutputTransferParams())
