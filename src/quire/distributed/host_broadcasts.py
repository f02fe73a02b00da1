"""Broadcasts of one process to others of its host, through memory that they share.

The memory is a ring without a name: its descriptor comes by a socket, which then carries the places
of what is sent and of what has been read, and by which each side learns at once that another one is
gone. It is small, so that what the sender writes is read from a cache that the processors share,
and receivers may read it in its place: each byte comes from memory once, and goes there once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from quire.distributed.meeting import Meeting, host_id
from quire.distributed.peer_sockets import accept_user, link_with_descriptor, listening_here
from quire.errors import PeersLost, WeightUpdateError

_RING_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
"""Bytes that receivers are told of at once, at most; with some pieces ahead no side waits."""
_ROWS = 32
"""Rows that a provider packs together: a piece has a multiple of these, where as many fit in."""
_ALIGNED = 64
_PLACE = struct.Struct("<QQ?")
"""The beginning and the size of a piece, and whether it is the last one of what is sent at once."""
_READ = b"\1"


class HostSender:
    """The side that sends. Calls raise WeightUpdateError where a receiver is gone, or does not read
    in time.
    """

    def __init__(self, ring: mmap.mmap, links: Sequence[socket.socket]) -> None:
        self._bytes = np.frombuffer(ring, dtype=np.uint8)
        self._links = links
        self._num_read = [0] * len(links)
        """Pieces that each receiver has read, of those that are still in `_pieces`."""
        self._pieces: deque[tuple[int, int]] = deque()
        """Beginnings and ends of those that are not known to be read by all."""
        self._next = 0
        self._replies = select.poll()
        for link in links:
            self._replies.register(link, select.POLLIN)
        self._close = finalize(self, _close_all, links)

    def send(self, data: Tensor, row_bytes: int = 1) -> None:
        """Send bytes [n], in rows, to all receivers; they have been copied when this returns."""
        values = data.numpy()
        step = _piece_bytes(row_bytes)
        for start in range(0, len(values), step):
            piece = values[start : start + step]
            at = self._find_room(len(piece))
            # in this thread alone: receivers work on the other processors meanwhile
            np.copyto(self._bytes[at : at + len(piece)], piece)
            with _others_live():
                for link in self._links:
                    link.sendall(_PLACE.pack(at, len(piece), start + step >= len(values)))

    def _find_room(self, nbytes: int) -> int:
        """The place for a piece, once nobody reads there."""
        self._note_read()
        if self._next + nbytes > _RING_BYTES:
            self._next = 0
        at, end = self._next, self._next + nbytes
        while any(start < end and at < stop for start, stop in self._pieces):
            self._await_oldest()
        self._pieces.append((at, end))
        self._next = -(-end // _ALIGNED) * _ALIGNED
        return at

    def _note_read(self) -> None:
        """Take note of what was read meanwhile. Receivers of many small pieces would wait for room
        in their sockets, long before there is none in the ring.
        """
        ready = {fd for fd, _ in self._replies.poll(0)}
        with _others_live():
            for i, link in enumerate(self._links):
                if link.fileno() in ready:
                    self._num_read[i] += len(_some(link, 4096))
        while self._pieces and all(self._num_read):
            self._num_read = [count - 1 for count in self._num_read]
            self._pieces.popleft()

    def _await_oldest(self) -> None:
        with _others_live():
            for i, link in enumerate(self._links):
                if not self._num_read[i]:
                    self._num_read[i] = len(_some(link, 4096))
                self._num_read[i] -= 1
        self._pieces.popleft()

    def close(self) -> None:
        """Leave; what was sent is still received. A call of another thread ends."""
        self._close()


class HostReceiver:
    """The side of a process that receives bytes in the order in which they are sent. Calls raise
    WeightUpdateError where the sender is gone.
    """

    def __init__(self, ring: mmap.mmap, link: socket.socket) -> None:
        self._bytes = torch.frombuffer(ring, dtype=torch.uint8)
        self._link = link
        self._at = self._left = 0
        """Place and size of what is left of the piece that came last."""
        self._is_last = True
        """Whether that piece ends what was sent at once."""
        self._num_read = self._bytes_read = 0
        """Pieces that the sender has not been told of, and their bytes."""
        self._close = finalize(self, _close_all, [link])

    def rows(self, count: int, row_bytes: int) -> Iterator[Tensor]:
        """The next bytes as tensors [n, row_bytes] of some rows, of `count` together: where the
        sender has written them, or a copy of one that it has sent in several pieces. They are there
        until the next are asked for.
        """
        left = count
        while left:
            if not self._left:
                self._receive_place()
            here = min(left, self._left // row_bytes)
            left -= here or 1
            if not here:
                row = torch.empty(row_bytes, dtype=torch.uint8)
                self.receive(row)
                yield row[None]
                continue
            size = here * row_bytes
            yield self._bytes[self._at : self._at + size].view(here, row_bytes)
            self._advance(size)

    def check_end(self) -> None:
        """Leave, and raise WeightUpdateError, where what was sent at once does not end here."""
        if self._left or not self._is_last:
            self.close()
            raise WeightUpdateError(
                "The trainer has sent tensors of other sizes, or in another order, than it has "
                "announced: they are out of step. Make another group."
            )

    def receive(self, data: Tensor) -> None:
        """Copy what comes next into bytes [n]."""
        at = 0
        while at < len(data):
            if not self._left:
                self._receive_place()
            size = min(self._left, len(data) - at)
            place = self._bytes[self._at : self._at + size]
            np.copyto(data[at : at + size].numpy(), place.numpy())
            self._advance(size)
            at += size

    def _advance(self, size: int) -> None:
        self._at += size
        self._left -= size
        self._bytes_read += size
        self._num_read += not self._left
        # not for each piece: a sender that waits for room is woken, and then has some to do
        if self._bytes_read >= _RING_BYTES // 2:
            self._release()

    def _release(self) -> None:
        """Tell the sender which pieces were read."""
        count, self._num_read, self._bytes_read = self._num_read, 0, 0
        # a sender that has left needs no room
        with contextlib.suppress(OSError):
            self._link.sendall(_READ * count)

    def _receive_place(self) -> None:
        if self._num_read and not select.select([self._link], [], [], 0)[0]:
            self._release()  # it may wait for room
        message = b""
        with _others_live():
            while len(message) < _PLACE.size:
                message += _some(self._link, _PLACE.size - len(message))
        self._at, self._left, self._is_last = _PLACE.unpack(message)

    def close(self) -> None:
        """Leave. A call of another thread ends."""
        self._close()


def open_side(meeting: Meeting, timeout_s: float) -> HostSender | HostReceiver | None:
    """This process's side of broadcasts by rank 0 of a meeting; None: not all of it are on one
    host, or there is no memory for it. Raises PeersLost where some do not come.
    """
    if len(set(meeting.exchange(host_id()))) > 1:
        return None
    if meeting.rank:
        name, *_ = meeting.exchange(b"")
        return _receiver(name, timeout_s) if name else None
    fd = _made()
    if fd is None:
        meeting.exchange(b"")
        return None
    links: list[socket.socket] = []
    try:
        with listening_here() as (listener, name):
            meeting.exchange(name)
            for _ in range(meeting.size - 1):
                links.append(accept_user(listener, timeout_s))
                socket.send_fds(links[-1], [b"\0"], [fd])
                links[-1].settimeout(timeout_s)
        return HostSender(mmap.mmap(fd, _RING_BYTES), links)
    except OSError as error:
        raise PeersLost(f"Another one of the group is gone: {error}") from error
    finally:
        os.close(fd)


def _made() -> int | None:
    fd = os.memfd_create("quire-broadcasts", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _RING_BYTES)
    except OSError:
        os.close(fd)
        return None
    return fd


def _receiver(name: bytes, timeout_s: float) -> HostReceiver:
    link, fd = link_with_descriptor(name, timeout_s)
    try:
        with os.fdopen(fd, "rb") as file:
            # private, which torch takes as writable: nothing is written
            ring = mmap.mmap(file.fileno(), _RING_BYTES, access=mmap.ACCESS_COPY)
    except OSError as error:
        link.close()
        raise PeersLost(f"The memory of the group was not received: {error}") from error
    return HostReceiver(ring, link)


def _piece_bytes(row_bytes: int) -> int:
    """The size of pieces of whole rows, or of any where a row has more."""
    rows = _PIECE_BYTES // row_bytes
    return (rows - rows % _ROWS if rows >= _ROWS else rows) * row_bytes or _PIECE_BYTES


def _some(link: socket.socket, count: int) -> bytes:
    found = link.recv(count)
    if not found:
        raise ConnectionError("it has left")
    return found


def _close_all(links: Sequence[socket.socket]) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


@contextlib.contextmanager
def _others_live() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightUpdateError(f"Another process of the group is gone: {error}") from error
