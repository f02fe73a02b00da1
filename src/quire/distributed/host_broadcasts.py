"""Broadcasts of one process to others of its host, through memory that they share.

The memory is a ring without a name: its descriptor comes by a socket, which then carries the places
of what is sent and of what has been read, and by which each side learns at once that another one is
gone. Receivers may read where the sender has written, so that each byte is copied once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from quire.distributed.meeting import Meeting, host_id
from quire.distributed.peer_sockets import accept_user, link_with_descriptor, listening_here
from quire.errors import PeersLost, WeightUpdateError

MOST_LENT = 32 << 20
"""Bytes of the sender's that a receiver reads in place at a time."""
_LARGEST = MOST_LENT // 2
_RING_BYTES = 2 * MOST_LENT + (2 << 20)
"""Room for all that is lent, which may begin and end in the middle of what was sent at once, for a
place at the end that is too small for what comes next, and for a sender that is ahead.
"""
_PIECE_BYTES = 2 << 20
"""More than the largest goes in pieces, which stay in the caches between being written and read."""
_ALIGNED = 64
_PLACE = struct.Struct("<QQ")
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
        self._close = finalize(self, _close_all, links)

    def send(self, data: Tensor) -> None:
        """Send bytes [n] to all receivers; they have been copied when this returns."""
        values = data.numpy()
        step = _PIECE_BYTES if len(values) > _LARGEST else max(1, len(values))
        for start in range(0, len(values), step):
            piece = values[start : start + step]
            at = self._find_room(len(piece))
            # in this thread alone: receivers work on the other processors meanwhile
            np.copyto(self._bytes[at : at + len(piece)], piece)
            with _others_live():
                for link in self._links:
                    link.sendall(_PLACE.pack(at, len(piece)))

    def _find_room(self, nbytes: int) -> int:
        """The place for a piece, once nobody reads there."""
        if self._next + nbytes > _RING_BYTES:
            self._next = 0
        at, end = self._next, self._next + nbytes
        while any(start < end and at < stop for start, stop in self._pieces):
            self._await_oldest()
        self._pieces.append((at, end))
        self._next = -(-end // _ALIGNED) * _ALIGNED
        return at

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
        self._num_read = 0
        """Pieces that the sender has not been told of."""
        self._close = finalize(self, _close_all, [link])

    def receive(self, data: Tensor) -> None:
        """Copy what comes next into bytes [n]."""
        self._fill(data, is_lent=False)

    def take(self, sizes: Sequence[int], make_room: Callable[[int], Tensor]) -> list[Tensor]:
        """The next bytes as tensors of these sizes: where the sender has written them, or in memory
        of `make_room` where that is not possible. They are there until `release`.
        """
        # a sender waits for room until all of these are released, so they must have room together
        is_lent = sum(sizes) <= MOST_LENT and not self._left
        found = []
        for size in sizes:
            if is_lent and size and not self._left:
                self._receive_place()
            if is_lent and size <= self._left:
                found.append(self._bytes[self._at : self._at + size])
                self._advance(size)
            else:
                found.append(make_room(size))
                self._fill(found[-1], is_lent)
        return found

    def release(self) -> None:
        """Tell the sender that what was taken has been read."""
        count, self._num_read = self._num_read, 0
        # a sender that has left needs no room
        with contextlib.suppress(OSError):
            self._link.sendall(_READ * count)

    def _fill(self, data: Tensor, is_lent: bool) -> None:
        at = 0
        while at < len(data):
            if not self._left:
                self._receive_place()
            size = min(self._left, len(data) - at)
            place = self._bytes[self._at : self._at + size]
            np.copyto(data[at : at + size].numpy(), place.numpy())
            self._advance(size)
            at += size
            if not is_lent:
                self.release()

    def _advance(self, size: int) -> None:
        if size:
            self._at += size
            self._left -= size
            self._num_read += not self._left

    def _receive_place(self) -> None:
        message = b""
        with _others_live():
            while len(message) < _PLACE.size:
                message += _some(self._link, _PLACE.size - len(message))
        self._at, self._left = _PLACE.unpack(message)

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
