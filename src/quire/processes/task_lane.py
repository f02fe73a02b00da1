"""A process that does tasks of clients, one after the other and within limits, as its starter sees
it. A task that ends the process costs its own request; task_main.py is the other end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import weakref
from collections.abc import Sequence

import msgspec

from quire.errors import CapacityError, EngineError
from quire.hardware.task_limits import OVER_TIME
from quire.processes.child_process import ChildProcess
from quire.processes.start_message import LENGTH
from quire.processes.task_main import TaskStart

logger = logging.getLogger(__name__)

_START_S = 120.0
_WAITING_FACTOR = 4
"""A task's limit in wall-clock time, as a multiple of its CPU time: the cores are shared."""
_MOST_WAITING = 64


class TaskEnded(Exception):
    """A task took too much, so its process was ended. `reason`: "takes more than 20 s"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Held:
    """The process of a lane. A program that embeds the server may drop it without closing anything;
    what is garbage then is finalised in no order, so that this is not a part of the lane.
    """

    def __init__(self) -> None:
        self.child: ChildProcess | None = None

    def close(self) -> None:
        """End the process. Idempotent."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.pipe.close()


class TaskLane:
    """One process, started at the first task, and again after it has ended. `module` has its
    `PROGRAM`; `name` says in errors and in the log what the process is for.
    """

    def __init__(self, module: str, start: TaskStart, name: str) -> None:
        self._module, self._start, self._name = module, start, name
        self._held = _Held()
        weakref.finalize(self, self._held.close)
        self._is_ended = False
        self._turn = asyncio.Lock()
        self.num_waiting = 0

    async def answer(self, data: bytes, fds: Sequence[int] = ()) -> bytes:
        """Have a task done; `fds` are sent with it. Raises TaskEnded, CapacityError when too many
        others wait, EngineError when the process does not start.
        """
        if self.num_waiting >= _MOST_WAITING:
            text = f"Too many tasks wait for the process that {self._name}."
            raise CapacityError(text, retry_after_s=1.0)
        self.num_waiting += 1
        try:
            async with self._turn:
                return await self._ask(data, fds)
        finally:
            self.num_waiting -= 1

    def end(self) -> None:
        """End the process; those who wait for their turn start no other one."""
        self._is_ended = True
        self._held.close()

    async def _ask(self, data: bytes, fds: Sequence[int]) -> bytes:
        if self._is_ended:
            raise EngineError(f"The process that {self._name} has been shut down.")
        if self._held.child is not None and not self._held.child.is_running:
            self._held.close()
        child = self._held.child or await self._started()
        try:
            answer = await self._answered(child, data, fds)
            if isinstance(answer, bytes):
                return answer
            await asyncio.to_thread(child.end, 0.0)  # the system takes its time to free memory
        except BaseException:  # a caller that is gone, for one, waits for no end
            self._held.close()
            raise
        self._held.close()
        logger.warning("The process that %s was ended: a task %s.", self._name, answer)
        raise TaskEnded(answer)

    async def _answered(self, child: ChildProcess, data: bytes, fds: Sequence[int]) -> bytes | str:
        """The answer of the process, or why it must be ended."""
        start = self._start
        try:
            async with asyncio.timeout(start.time_s * _WAITING_FACTOR):
                await _send(child, data, fds)
                return await _receive(child)
        except TimeoutError:
            return f"takes more than {start.time_s:g} s"
        except (EOFError, OSError):
            await asyncio.to_thread(child.exit_words)
            if child.exit_code == -OVER_TIME:
                return f"takes more than {start.time_s:g} s"
            return f"takes more than {start.memory_bytes >> 20} MiB, or makes the process fail"

    async def _started(self) -> ChildProcess:
        child = self._held.child = ChildProcess(self._module)
        try:
            child.start(msgspec.structs.replace(self._start))
            child.pipe.setblocking(False)
            async with asyncio.timeout(_START_S):
                await _receive(child)
        except (TimeoutError, EOFError, OSError):
            self._held.close()
            raise EngineError(f"The process that {self._name} did not start.") from None
        except BaseException:
            self._held.close()
            raise
        return child


async def _send(child: ChildProcess, data: bytes, fds: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    length = LENGTH.pack(len(data))
    if fds:  # the pipe is empty between tasks, so that these few bytes are taken at once
        socket.send_fds(child.pipe, [length], list(fds))
    else:
        await loop.sock_sendall(child.pipe, length)
    await loop.sock_sendall(child.pipe, data)


async def _receive(child: ChildProcess) -> bytes:
    """The next message. Raises EOFError."""
    (length,) = LENGTH.unpack(await _exactly(child, LENGTH.size))
    return await _exactly(child, length)


async def _exactly(child: ChildProcess, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray(length)
    view, place = memoryview(data), 0
    while place < length:
        num = await loop.sock_recv_into(child.pipe, view[place:])
        if not num:
            raise EOFError
        place += num
    return bytes(data)
