"""Tensors that a trainer broadcasts to a worker: while some are loaded, the next are received."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.distributed.host_broadcasts import HostReceiver
from quire.distributed.named_tensors import TensorMeta, chunks_of, layer_runs, views_of
from quire.distributed.trainer_group import BroadcastWork, PyNcclCommunicator
from quire.errors import WeightUpdateError
from quire.ops.formats.row_stack import RowStack

LEAST_BY_ROWS = 256 << 10
"""Bytes of a tensor that is given to the model as its rows, while they come."""
_TRAINER = 0
_WINDOW_BYTES = 32 << 20
"""Separate tensors that are received before they are loaded: whole layers."""
_MOST_KEPT = 64 << 20
_STRETCH = 4 << 20
_STRETCH_S = 0.0015
"""Seconds of a processor that small pages of a stretch take."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux, which the standard library does not name."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tensors that are loaded together, and the messages that they come in."""

    messages: Sequence[Sequence[TensorMeta]]

    @property
    def metas(self) -> list[TensorMeta]:
        """Its tensors, in the order in which they come."""
        return [meta for message in self.messages for meta in message]

    @property
    def nbytes(self) -> int:
        """The memory of all its tensors."""
        return sum(meta.nbytes for meta in self.metas)


def packed_windows(metas: Iterable[TensorMeta], limit: int) -> list[Window]:
    """Windows of tensors that come in buffers with more than `limit` bytes, a buffer each."""
    return [Window([chunk]) for chunk in chunks_of(metas, limit)]


def separate_windows(metas: Iterable[TensorMeta]) -> list[Window]:
    """Windows of tensors that come one by one."""
    return [Window([[meta] for meta in run]) for run in layer_runs(metas, _WINDOW_BYTES)]


class Rooms:
    """Memory of two windows, of which one is received and one is loaded. It is used again, since
    fresh memory is slow; that of a window with more than `_MOST_KEPT` bytes goes with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Tensor | None] = [None, None]

    def take(self, place: int, nbytes: int) -> Tensor:
        """Memory for the window of this number, when that of two before is loaded."""
        kept = self._kept[place % 2]
        if kept is None or len(kept) < nbytes:
            # let go of first: there may be no room for both
            kept = self._kept[place % 2] = None
            kept = self.fresh(nbytes)
            if nbytes <= _MOST_KEPT:
                self._kept[place % 2] = kept
        return kept[:nbytes]

    def fresh(self, nbytes: int) -> Tensor:
        """Memory that was not used before. Raises WeightUpdateError where there is none."""
        # pages of its own take longer than what a small tensor is received in
        if self._device.type != "cpu" or nbytes < LEAST_BY_ROWS:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # the C library keeps what is smaller than 32 MiB
        try:
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            text = f"There is no memory for {nbytes} bytes, which the shapes of the update say"
            raise WeightUpdateError(f"{text}: {error}") from error
        _ask_for_huge_pages(pages)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def clear(self) -> None:
        self._kept = [None, None]


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    """Fill memory with huge pages as long as the system has some at hand: small ones take as long
    as receiving what they are for, and to search for huge ones may take longer than the update.
    """
    for at in range(0, len(pages) - _STRETCH + 1, _STRETCH):
        began = time.thread_time()
        try:
            pages.madvise(mmap.MADV_HUGEPAGE, at, _STRETCH)
            pages.madvise(_POPULATE_WRITE, at, _STRETCH)
        except OSError:  # an older kernel
            return
        if time.thread_time() - began > _STRETCH_S:
            return


class IncomingTensors:
    """The tensors of some windows, by their names. Those of a window are there until the next one
    is asked for.
    """

    def __init__(
        self, communicator: PyNcclCommunicator, windows: Sequence[Window], rooms: Rooms
    ) -> None:
        self._communicator = communicator
        self._windows = windows
        self._rooms = rooms

    def __iter__(self) -> Iterator[Iterable[tuple[str, Tensor | RowStack]]]:
        """Raises WeightUpdateError when the trainer is gone."""
        lender = self._communicator.lender
        if lender is not None:
            tensors = self._one_by_one(lender)
            yield tensors
            deque(tensors, maxlen=0)  # after an error of who was given them
            return
        ahead: _Reception | None = None
        for place in range(len(self._windows)):
            now = ahead or self._begin(place)
            ahead = None
            if place + 1 < len(self._windows) and self._windows[place + 1].nbytes <= _MOST_KEPT:
                ahead = self._begin(place + 1)
            received = now.tensors()
            del now
            yield received
            received.clear()  # before the next of them need memory

    def _one_by_one(self, lender: HostReceiver) -> Iterator[tuple[str, Tensor | RowStack]]:
        """The tensors, large ones as their rows where the trainer has written them, who meanwhile
        writes the next.
        """
        for message in (message for window in self._windows for message in window.messages):
            for meta in message:
                yield from self._lent(lender, meta)
            # a sender may send each of its tensors by itself
            lender.check_end()

    def _lent(
        self, lender: HostReceiver, meta: TensorMeta
    ) -> Iterator[tuple[str, Tensor | RowStack]]:
        if len(meta.shape) != 2 or meta.nbytes < LEAST_BY_ROWS:
            room = self._rooms.fresh(meta.nbytes)
            lender.receive(room)
            yield from views_of(room, [meta])
            return
        count, width = meta.shape
        rows = _typed(lender.rows(count, width * meta.dtype.itemsize), meta.dtype)
        yield meta.name, RowStack((count, width), meta.dtype, rows.__iter__)
        deque(rows, maxlen=0)  # those that nobody has read

    def _begin(self, place: int) -> _Reception:
        window = self._windows[place]
        room = self._rooms.take(place, window.nbytes)
        works, at = [], 0
        for message in window.messages:
            size = sum(meta.nbytes for meta in message)
            works.append(self._communicator.start_broadcast(room[at : at + size], _TRAINER))
            at += size
        return _Reception(window, room, works)


def _typed(rows: Iterable[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Rows of bytes as those of numbers."""
    for each in rows:
        is_aligned = each.storage_offset() % dtype.itemsize == 0
        yield (each if is_aligned else each.clone()).view(dtype)


@dataclass(frozen=True, slots=True)
class _Reception:
    """A window that is received into `room`."""

    window: Window
    room: Tensor
    works: list[BroadcastWork]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Wait for them."""
        for work in self.works:
            work.wait()
        return list(views_of(self.room, self.window.metas))
