"""Processes as a group that exchanges bytes, by gloo: the cores of one engine over the loopback
interface, or ranks of several hosts.

A group is an object, not torch's one per process: two engines can live in one process. Its
addresses are in a store: for cores a file that only this user can read, in the folder of the
engine's sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from quire.distributed.expert_exchange import LOOK_S
from quire.errors import PeersLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GlooGroup:
    """`size` processes, of which this is number `rank`. Every call is made by all of them, in the
    same order; one whose partner is gone, or waits longer than `timeout_s`, raises PeersLost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        address: str = "127.0.0.1",
    ) -> None:
        """Wait until all processes have joined. `store` has nothing of an earlier group, and
        `address` is one of this host that the others reach.
        """
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        gloo: Any = distributed.ProcessGroupGloo  # its stub knows little of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s + 4 * LOOK_S)  # ours comes first
        options._threads = 1
        options._devices = [gloo.create_device(hostname=address)]
        try:
            self._group: Any = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise PeersLost(f"The others of the group did not come: {error}") from error

    @classmethod
    def of_file(cls, file: Path, rank: int, size: int, timeout_s: float) -> GlooGroup:
        """The group of processes of this host that meet in a file which no earlier group has
        used.
        """
        store = distributed.FileStore(str(file), size)  # type: ignore[attr-defined]
        return cls(store, rank, size, timeout_s)

    def all_gather(
        self, values: Sequence[int], while_waiting: Callable[[], None] = lambda: None
    ) -> list[list[int]]:
        """Gather the numbers of each rank; all ranks have equally many. `while_waiting` is called
        repeatedly.
        """
        ours = torch.tensor(values, dtype=torch.int64)
        all_ = torch.empty(self.size * len(values), dtype=torch.int64)
        self._finish(self._group._allgather_base(all_, ours), while_waiting)
        return all_.view(self.size, len(values)).tolist()

    def all_to_all(
        self,
        sent: Tensor,
        to_each: list[int],
        from_each: list[int],
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Rows of bytes [n, w]: the first `to_each[0]` of `sent` go to rank 0 and so on ->
        [sum(from_each), w], in the order of the ranks. `while_waiting` is called repeatedly.
        """
        received = sent.new_empty(sum(from_each), sent.shape[1])
        self._finish(self._group.alltoall_base(received, sent, from_each, to_each), while_waiting)
        return received

    def all_gather_bytes(self, sent: Tensor) -> Tensor:
        """Bytes [n] of each rank, equally many -> [size, n]."""
        received = sent.new_empty(self.size, len(sent))
        if len(sent):
            self._finish(self._group._allgather_base(received.view(-1), sent))
        return received

    def close(self) -> None:
        """Close the connections, which ends the calls of the others with PeersLost. Idempotent."""
        self._group = None

    def _finish(
        self, work: distributed.Work, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        waited_s = 0.0
        while not self._wait(work, LOOK_S):
            waited_s += LOOK_S
            if waited_s >= self._timeout_s:
                raise PeersLost(f"The others of the group were silent for {waited_s:g} s.")
            while_waiting()

    def _wait(self, work: distributed.Work, timeout_s: float) -> bool:
        """Wait for the work; returns whether it is done in time."""
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if work.is_completed() or "timed out" not in str(error).lower():
                raise PeersLost(f"Another one of the group is gone: {error}") from error
            return False
        return True
