"""A second queue of a device: copies from the host that run beside the work of the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Arrival(Protocol):
    """Copies that are under way."""

    def join(self) -> None:
        """Let all work that is queued from now on wait for the copies; the host goes on."""
        ...


class CopyQueue(Protocol):
    """Copies in the order in which they are started. All may be a part of a captured graph, which
    must contain the `join` of each copy that it starts.
    """

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        """Queue copies: (device memory, pinned memory of the host) of the same shape and type.

        They begin when all work that is queued so far is done, so whatever reads the targets now
        may be queued before; work that is queued later does not wait for them. Raises
        EngineDeadError.
        """
        ...
