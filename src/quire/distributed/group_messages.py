"""Messages of a torch process group, and those of gloo with their sizes.

Gloo ends the process that has room for fewer bytes than come, from a thread of its own, and leaves
the rest of larger room as it was. So each message goes after one of fixed size that says how many
bytes it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, distributed

from quire.errors import WeightUpdateError


class Messages:
    """Messages between the processes of `group`; each returns something to wait for."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, data: Tensor, src: int) -> Any:
        """Give the tensor of process `src` to all, in place."""
        options: Any = distributed.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank = src
        return self._group.broadcast([data], options)

    def all_reduce(self, data: Tensor) -> Any:
        """Add up the tensors of all, in place."""
        return self._group.allreduce([data])

    def send(self, data: Tensor, dst: int) -> Any:
        """Send a tensor to one process."""
        return self._group.send([data], dst, 0)

    def recv(self, data: Tensor, src: int) -> Any:
        """Receive one from it, in place."""
        return self._group.recv([data], src, 0)


class SizedMessages(Messages):
    """The same by gloo, with their sizes. Those of a process go in the order of the calls; where
    sizes differ, its `wait` raises WeightUpdateError, and so do all after it.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(group)
        self._rank, self._size = rank, size
        self._difference = ""
        self._calls: SimpleQueue[_Begun | None] = SimpleQueue()
        # one that does not keep the program from ending, nor this object
        threading.Thread(target=_serve, args=(self._calls,), name="gloo", daemon=True).start()
        finalize(self, self._calls.put, None)

    def broadcast(self, data: Tensor, src: int) -> Any:
        def begin() -> list[Any]:
            header = _size_of(data)
            if self._rank == src:
                return [Messages.broadcast(self, each, src) for each in (header, data)]
            came = torch.empty_like(header)
            Messages.broadcast(self, came, src).wait()
            self._check(header, came)
            return [Messages.broadcast(self, data, src)]

        return self._begin(begin)

    def all_reduce(self, data: Tensor) -> Any:
        def begin() -> list[Any]:
            header = _size_of(data)
            came = header.new_empty(self._size)
            self._group._allgather_base(came, header).wait()
            self._check(header, came)
            return [Messages.all_reduce(self, data)]

        return self._begin(begin)

    def send(self, data: Tensor, dst: int) -> Any:
        def begin() -> list[Any]:
            return [Messages.send(self, each, dst) for each in (_size_of(data), data)]

        return self._begin(begin)

    def recv(self, data: Tensor, src: int) -> Any:
        def begin() -> list[Any]:
            header = _size_of(data)
            came = torch.empty_like(header)
            Messages.recv(self, came, src).wait()
            self._check(header, came)
            return [Messages.recv(self, data, src)]

        return self._begin(begin)

    def _begin(self, begin: Callable[[], list[Any]]) -> _Begun:
        call = _Begun(partial(self._unless_out_of_step, begin))
        self._calls.put(call)
        return call

    def _unless_out_of_step(self, begin: Callable[[], list[Any]]) -> list[Any]:
        if self._difference:
            raise WeightUpdateError(self._difference)
        return begin()

    def _check(self, header: Tensor, came: Tensor) -> None:
        ours = int(header)
        theirs = next((size for size in came.tolist() if size != ours), None)
        if theirs is None:
            return
        self._difference = (
            f"Another process of the group has {theirs} bytes where this one expects {ours}: they "
            "are out of step. Make another group."
        )
        # those that wait for this process are told at once
        self._group = None
        raise WeightUpdateError(self._difference)


class _Begun:
    """Something to be begun; `wait` until it has ended."""

    def __init__(self, begin: Callable[[], list[Any]]) -> None:
        self._begin: Callable[[], list[Any]] | None = begin
        self._works: Future[list[Any]] = Future()

    def run(self) -> None:
        begin, self._begin = self._begin, None
        assert begin is not None
        try:
            self._works.set_result(begin())
        except BaseException as error:
            self._works.set_exception(error)

    def wait(self) -> None:
        for work in self._works.result():
            work.wait()


def _serve(calls: SimpleQueue[_Begun | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # with what it holds, while there is nothing to do


def _size_of(data: Tensor) -> Tensor:
    return torch.tensor([data.nbytes])
