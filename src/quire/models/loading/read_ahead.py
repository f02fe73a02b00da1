"""Reads leaves before they are asked for, while the model is being built on a device.

A checkpoint's bytes come out of the page cache at a few GB/s per core, and a device takes them from
pinned memory without the host. So a thread copies the next leaves into pinned buffers, each in
pieces by several threads (copies release the interpreter's lock), as far ahead as a bound allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from quire.models.parameters import Parameter
from quire.ops import CodedWeight

_MOST_BYTES = 512 << 20
_NUM_THREADS = 4
_LEAST_PIECE = 1 << 20
"""Bytes below which a copy is not divided."""

Read = Callable[[Parameter], Tensor | CodedWeight]
"""Gives a leaf, valid until the next call."""


class ReadAhead:
    """Leaves in host buffers of their own, in the order in which `leaves` names them.

    `read` is called by one thread alone. Asking in another order works, at the price of memory.
    """

    def __init__(
        self,
        read: Read,
        leaves: Iterable[Parameter],
        *,
        is_pinned: bool,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """is_pinned: into memory that a GPU copies from. most_bytes: read ahead, or one leaf."""
        self._read = read
        self._is_pinned = is_pinned
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._ready: dict[str, Tensor | CodedWeight] = {}
        self._wanted: str | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="read-weights")
        self._thread = threading.Thread(target=self._run, args=(list(leaves),), daemon=True)
        self._thread.start()

    def __call__(self, leaf: Parameter) -> Tensor | CodedWeight:
        """The leaf in its stored dtype, in memory of its own. Raises what `read` has raised."""
        with self._changed:
            self._wanted = leaf.name
            self._changed.notify_all()
            self._changed.wait_for(lambda: leaf.name in self._ready or self._failure is not None)
            self._wanted = None
            if leaf.name in self._ready:
                found = self._ready.pop(leaf.name)
                self._changed.notify_all()
                return found
            assert self._failure is not None
            raise self._failure

    def close(self) -> None:
        """Read no more, and wait for what is being read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._pool.shutdown()

    def _run(self, leaves: list[Parameter]) -> None:
        try:
            for leaf in leaves:
                if not self._may_go_on():
                    return
                values = self._owned(self._read(leaf))
                with self._changed:
                    self._ready[leaf.name] = values
                    self._changed.notify_all()
            # kept as the failure, so that nobody waits for it forever
            raise AssertionError("a leaf was asked for that is not among those to be read")
        # whatever it is: the thread that builds the model waits for a leaf, and raises it there
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        """Wait until there is room, or until somebody waits for what is not there."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_wanting or self._has_room)
            return not self._is_closed

    @property
    def _is_wanting(self) -> bool:
        return self._wanted is not None and self._wanted not in self._ready

    @property
    def _has_room(self) -> bool:
        return sum(t.nbytes for t in self._ready.values()) < self._most_bytes

    def _owned(self, source: Tensor | CodedWeight) -> Tensor | CodedWeight:
        if isinstance(source, CodedWeight):
            return source.each(self._copied)
        return self._copied(source)

    def _copied(self, source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._is_pinned)
        if source.dim() == 0 or source.nbytes < _LEAST_PIECE:
            return target.copy_(source)
        pieces = zip(target.chunk(_NUM_THREADS), source.chunk(_NUM_THREADS), strict=True)
        for done in [self._pool.submit(to.copy_, part) for to, part in pieces]:
            done.result()
        return target
