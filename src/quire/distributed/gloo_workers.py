"""Workers in processes of several hosts exchange tensors by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.distributed.gloo_group import GlooGroup
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import PeersLost


class GlooWorkers:
    """One worker's side of a `GlooGroup`, as a `WorkerGroup`; what it gives is what shared_group.py
    gives. A call raises ExchangeAborted if another worker is gone or silent.
    """

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.stack(list(self._parts(x)), 1, out=out)

    def largest(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.amax(self._parts(x), 0, out=out)  # type: ignore[no-any-return]

    def apply(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int
    ) -> Tensor:
        return function(*inputs)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._parts(x)[0]

    def _parts(self, x: Tensor) -> Tensor:
        """The workers' tensors [*] -> [size, *]."""
        try:
            found = self._group.all_gather_bytes(x.reshape(-1).contiguous().view(torch.uint8))
        except PeersLost as error:
            raise ExchangeAborted(str(error)) from error
        return found.view(-1).view(x.dtype).view(self.size, *x.shape)
