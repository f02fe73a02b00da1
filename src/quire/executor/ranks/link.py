"""A socket between a core and a rank, for messages of frames in both directions.

Neither side may wait for the other to read before it reads itself: a message that does not fit into
the socket's buffer is sent while others are taken in.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from quire.processes.codec import Frame, buffer_of, num_bytes

_COUNT = struct.Struct("<Q")
_READ_BYTES = 1 << 18


def framed(frames: Sequence[Frame]) -> list[memoryview]:
    """A message as it is sent: the number and the sizes of its frames, and the frames."""
    sizes = [num_bytes(frame) for frame in frames]
    header = b"".join(map(_COUNT.pack, (len(sizes), *sizes)))
    return [memoryview(header), *(memoryview(buffer_of(frame)).cast("B") for frame in frames)]


def frames_in(whole: memoryview) -> list[memoryview]:
    """The frames of a message that has come whole."""
    count = _COUNT.unpack_from(whole)[0]
    at, frames = (count + 1) * _COUNT.size, []
    for place in range(count):
        (length,) = _COUNT.unpack_from(whole, (place + 1) * _COUNT.size)
        frames.append(whole[at : at + length])
        at += length
    return frames


class RankLink:
    """One end. Every call is made by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._messages: deque[list[memoryview]] = deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor, which is readable when something has come or the other end is closed."""
        return self._socket.fileno()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. Raises OSError when the other end is closed."""
        left = framed(frames)
        while left:
            try:
                # a part at a time: the system takes no more than 1,024 buffers in a call
                sent = self._socket.sendmsg(left[:64])
            except BlockingIOError:
                self._wait_to_send()
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def take(self) -> list[memoryview] | None:
        """The next message that has come whole; None: there is none yet. Raises EOFError once the
        other end is closed and all messages are taken.
        """
        if not self._messages:
            self._read()
        return self._messages.popleft() if self._messages else None

    def receive(self) -> list[memoryview]:
        """Wait for the next message. Raises EOFError when the other end is closed."""
        while (found := self.take()) is None:
            self._poll.poll()
        return found

    def close(self) -> None:
        self._socket.close()

    def _wait_to_send(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        # both ends may be sending, and would otherwise wait for each other for ever
        if any(events & select.POLLIN for _, events in poll.poll()):
            self._read()

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError as error:
                raise EOFError("the other end of the link is closed") from error
            if not data:
                # what came before the end is served first; the next read finds the end again
                if self._messages:
                    return
                raise EOFError("the other end of the link is closed")
            self._received += data
            self._split()
            # the socket was emptied, which spares the call that would say so
            if len(data) < _READ_BYTES:
                return

    def _split(self) -> None:
        """Cut whole messages off what has come."""
        while (size := self._first_size()) is not None and len(self._received) >= size:
            # a copy, since a buffer that is viewed cannot be shortened
            whole = memoryview(bytes(self._received[:size]))
            del self._received[:size]
            self._messages.append(frames_in(whole))

    def _first_size(self) -> int | None:
        """Bytes of the first message with its header; None: the header has not come whole."""
        if len(self._received) < _COUNT.size:
            return None
        count: int = _COUNT.unpack_from(self._received)[0]
        end = (count + 1) * _COUNT.size
        if len(self._received) < end:
            return None
        sizes: tuple[int, ...] = struct.unpack_from(f"<{count}Q", self._received, _COUNT.size)
        return end + sum(sizes)
