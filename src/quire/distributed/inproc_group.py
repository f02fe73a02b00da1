"""Workers in threads of one process exchange tensors through memory that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.distributed.worker_group import ExchangeAborted


class InprocExchange:
    """An exchange of `size` threads: each provides a tensor and gets those of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._tensors: list[Tensor] = [torch.empty(0)] * size

    def groups(self) -> list[InprocGroup]:
        """Return each worker's side of the exchange, by rank."""
        return [InprocGroup(self, rank) for rank in range(self.size)]

    def swap(self, rank: int, tensor: Tensor, take: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Wait until all have provided a tensor, and return what `take` makes of all by rank. No
        tensor changes before all have taken. Raises ExchangeAborted, now and until `reset`, if one
        of them has failed.
        """
        try:
            self._tensors[rank] = tensor
            self._barrier.wait()
            found = take(self._tensors)
            self._barrier.wait()  # a recorded program uses a tensor's memory again after this call
        except threading.BrokenBarrierError as error:
            raise ExchangeAborted from error
        return found

    def abort(self) -> None:
        """End the wait of all threads, which then raise ExchangeAborted."""
        self._barrier.abort()

    def reset(self) -> None:
        """Make the group usable again; no thread may be in an exchange."""
        self._barrier.reset()


class InprocGroup:
    """One worker's side of an exchange, used by one thread at a time."""

    def __init__(self, exchange: InprocExchange, rank: int) -> None:
        self._exchange = exchange
        self.rank, self.size = rank, exchange.size

    def gather(self, x: Tensor, out: Tensor | None = None, *, to_first: bool = False) -> Tensor:
        return self._exchange.swap(self.rank, x, lambda parts: torch.stack(list(parts), 1, out=out))

    def largest(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._exchange.swap(
            self.rank, x, lambda parts: torch.amax(torch.stack(list(parts)), 0, out=out)
        )

    def apply(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int
    ) -> Tensor:
        return function(*inputs)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange.swap(self.rank, x, lambda parts: parts[0])
