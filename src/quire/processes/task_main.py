"""The loop of a process that does tasks of clients within limits; task_lane.py starts it."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable

from quire.hardware.task_limits import cpu_time, limit_memory
from quire.processes.start_message import LENGTH, ChildStart, receive_exactly, send_frame

READY = b"ready"
"""The first message of the process."""
NICENESS = 5
"""Niceness below the engine's: a task waits rather than the streams."""

_TRIMMED_BYTES = 1 << 20
_MOST_FDS = 2


class TaskStart(ChildStart, kw_only=True):
    """Limits: CPU seconds of each task, and bytes beyond what being ready takes."""

    time_s: float
    memory_bytes: int


def serve_tasks(
    pipe: socket.socket, start: TaskStart, answer: Callable[[bytearray, list[int]], bytes]
) -> int:
    """Do tasks until the pipe is closed; the exit code. `answer` gets a task and the descriptors
    that came with it, which are closed afterwards. What it imports should be there before: it is
    not counted. The kernel ends the process where a task takes too much time.
    """
    limit_memory(start.memory_bytes)
    send_frame(pipe, READY)
    while True:
        try:
            data, fds = _receive_task(pipe)
        except EOFError:
            return 0
        with cpu_time(start.time_s):
            reply = answer(data, fds)
        for fd in fds:
            os.close(fd)
        send_frame(pipe, reply)
        is_long = len(data) > _TRIMMED_BYTES or bool(fds)
        # let go of before memory is given back
        del data, reply
        if is_long:
            _trim()


def lower_priority() -> None:
    """Let the engine and the streams go first."""
    os.nice(NICENESS)


def _receive_task(pipe: socket.socket) -> tuple[bytearray, list[int]]:
    """The next task, and its descriptors. Raises EOFError when the other end is closed."""
    head, fds, _, _ = socket.recv_fds(pipe, LENGTH.size, _MOST_FDS)
    if not head:
        raise EOFError("the other end of the pipe is closed")
    head += receive_exactly(pipe, LENGTH.size - len(head))
    return receive_exactly(pipe, LENGTH.unpack(head)[0]), fds


def _trim() -> None:
    """Give freed memory back to the system (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
