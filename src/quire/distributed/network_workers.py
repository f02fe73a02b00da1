"""Workers of several hosts, or on devices of their own, exchange tensors over a network:
torch's gloo moves those of CPUs (gloo_group.py), NCCL those of GPUs (nccl_group.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.distributed.worker_group import ExchangeAborted
from quire.errors import PeersLost


class ByteGroup(Protocol):
    """Processes that gather bytes. Every call is made by all of them, in the same order; one whose
    partner is gone raises PeersLost.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather_bytes(self, sent: Tensor) -> Tensor:
        """Gather bytes [n] of each rank, equally many -> [size, n]."""
        ...

    def close(self) -> None:
        """Close the connections, which ends the calls of the others with PeersLost. Idempotent."""
        ...


class NetworkWorkers:
    """One worker's side of a `ByteGroup`, as a `RankGroup`; what it gives is what shared_group.py
    gives. A call raises ExchangeAborted if another worker has aborted, is gone or silent.

    An abort closes the connections of this side, so that the others fail in the collective that
    they are in or come to next: it has no reason on their side.
    """

    def __init__(self, open_group: Callable[[int], ByteGroup]) -> None:
        """`open_group(n)` connects the group after n aborts; it waits for all workers."""
        self._open_group = open_group
        self._group: ByteGroup | None = open_group(0)
        self._num_joined = 0
        self._reason = ""
        self.rank, self.size = self._group.rank, self._group.size

    def gather(self, x: Tensor, out: Tensor | None = None, *, to_first: bool = False) -> Tensor:
        return torch.stack(list(self._parts(x)), 1, out=out)

    def largest(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.amax(self._parts(x), 0, out=out)  # type: ignore[no-any-return]

    def apply(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int
    ) -> Tensor:
        return function(*inputs)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._parts(x)[0]

    def abort(self, reason: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._reason = reason
            group.close()

    def rejoin(self, number: int) -> None:
        """As `RankGroup.rejoin`; waits until all workers have. Raises PeersLost if they do not."""
        if number == self._num_joined:
            return
        self.abort("the group is connected anew")
        self._group, self._num_joined = self._open_group(number), number

    def _parts(self, x: Tensor) -> Tensor:
        """The workers' tensors [*] -> [size, *]."""
        if self._group is None:
            raise ExchangeAborted(self._reason)
        try:
            found = self._group.all_gather_bytes(x.reshape(-1).contiguous().view(torch.uint8))
        except PeersLost as error:
            self.abort(str(error))
            raise ExchangeAborted(str(error)) from error
        return found.view(-1).view(x.dtype).view(self.size, *x.shape)
