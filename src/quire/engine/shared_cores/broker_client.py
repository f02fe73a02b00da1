"""The client of one of several API servers: it reaches the cores through the process that owns them
(broker.py), which chooses between cores and restarts them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import msgspec

from quire.encodable import NotEncodable
from quire.engine.client.client import CoreStatus
from quire.engine.client.kept_media import KeptMedia
from quire.engine.client.pending_calls import (
    PendingCalls,
    answer_to,
    not_encodable,
    request_not_encodable,
)
from quire.engine.shared_cores import broker_messages as wire
from quire.engine.shared_cores.broker_messages import CoreStates, MetricsNow, ServerReport
from quire.engine.wire.channel import Channel
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityOutput,
    UtilityRequest,
)
from quire.errors import EngineDeadError, EngineError, InvalidParameter

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_S = 0.5
"""Interval of a server's reports, in seconds."""
_GONE = "The process that owns the engine is gone."

Answerer = Callable[[list[Any]], Awaitable[object]]


class CoreBrokerClient:
    """`AsyncEngineCoreClient` through the broker. `open` makes one, in an event loop.

    `answerers` serve the calls of the broker, by method. `media` counts what the broker keeps for
    this server's requests, of this server's share.
    """

    def __init__(self, media: KeptMedia | None = None) -> None:
        self._channel = Channel(
            {
                wire.OUTPUTS: (EngineCoreOutputs, self._on_outputs),
                wire.STATUS: (CoreStates, self._on_status),
                wire.UTILITY: (UtilityRequest, self._on_call),
                wire.DEAD: (str, self._die),
            },
            lambda: self._die(_GONE),
        )
        self.answerers: dict[str, Answerer] = {}
        self.collect: Callable[[], ServerReport] = ServerReport
        """Gives the next report, with what was counted since the last one."""
        self.is_up = False
        """Whether this server takes connections, which the owner waits for."""
        self._media = media or KeptMedia()
        self._events: deque[EngineCoreOutputs] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._calls = PendingCalls()
        self._statuses: dict[int, CoreStatus] = {}
        self._status_at = time.monotonic()
        self._opened = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answering: set[asyncio.Future[None]] = set()

    @classmethod
    async def open(cls, pipe: socket.socket, media: KeptMedia | None = None) -> Self:
        """A client at one end of the pipe that its process was started with."""
        client = cls(media)
        await client._channel.open(pipe)
        client._report_again()
        return client

    async def wait_until_open(self) -> None:
        """Return when the cores take requests. Raises EngineDeadError when they never will."""
        await self._opened.wait()
        self._require_open()

    # requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises EngineDeadError, InvalidParameter for one without a handle, a rank
        that there is not, and a value that cannot be sent.
        """
        self._require_open()
        if request.handle < 0:
            hint = "Give the request to the engine, as a prompt."
            raise InvalidParameter("handle", request.handle, "the engine's cores are shared", hint)
        pinned = request.data_parallel_rank
        if pinned is not None and pinned not in self._statuses:
            known = ", ".join(map(str, self.engine_indices))
            raise InvalidParameter("data_parallel_rank", pinned, f"the cores are {known}")
        try:
            sent = self._media.keep_elsewhere(request)
            self._channel.send(wire.ADD, sent, request.handle, is_strict=True)
        except NotEncodable as error:
            self._media.drop(request.handle)
            raise request_not_encodable(self._channel.encode, request, error) from error

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        self._require_open()
        own = [handle for handle in handles if type(handle) is int]
        self._channel.send(wire.ABORT, own)
        for handle in own:
            self._media.drop(handle)

    def survives(self, handle: int) -> bool:
        return handle in self._media.digests

    def engine_of(self, handle: int) -> int | None:
        """Always None: only the broker knows the core."""
        return None

    async def get_output(self) -> EngineCoreOutputs:
        while not self._events:
            self._require_open()
            if self._arrival is None or self._arrival.done():
                self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._events.popleft()

    def wait_output(self, limit_s: float) -> EngineCoreOutputs | None:
        """Outputs that have come already: more come only while the event loop runs. Raises
        EngineDeadError where nothing has, so that nobody waits for it.
        """
        if self._events:
            return self._events.popleft()
        raise EngineDeadError("An API server ends its requests before it leaves the engine.")

    # cores

    @property
    def engine_indices(self) -> Sequence[int]:
        return sorted(self._statuses)

    def core_status(self, engine_index: int) -> CoreStatus:
        """The status last sent by the broker, with the time that has passed since."""
        status = self._statuses[engine_index]
        return replace(status, silent_s=status.silent_s + time.monotonic() - self._status_at)

    async def call(self, utility: Utility[T]) -> T:
        self._require_open()
        call_id, future = self._calls.begin(utility, [0])
        try:
            call = UtilityRequest.of(call_id, utility)
            self._channel.send(wire.UTILITY, call, call_id, is_strict=True)
        except NotEncodable as error:
            future.cancel()
            raise not_encodable(utility, error) from error
        return await answer_to(utility, future)

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        await self.call(Utility(wire.SCALE, (num_cores, drain_timeout_s)))

    async def is_scaling(self) -> bool:
        return bool(await self.call(Utility(wire.IS_SCALING)))

    async def metrics(self) -> MetricsNow:
        return msgspec.convert(await self.call(Utility(wire.METRICS)), MetricsNow)

    async def abort_elsewhere(self, shown: Sequence[str] | None) -> int:
        """Have the other servers end requests by the ids that clients know; how many they were."""
        names = None if shown is None else list(shown)
        return await self.call(Utility(wire.ABORT_SHOWN, (names,)))

    def report(self) -> None:
        """Send the broker what was counted here, now."""
        report = self.collect()
        report.is_up = self.is_up
        self._channel.send(wire.REPORT, report)

    def shutdown(self, timeout: float | None = None) -> None:
        """Disconnect from the engine, which goes on for others; what was sent arrives."""
        if self._timer is not None:
            self._timer.cancel()
        if self._error is None:
            self._error = EngineDeadError("The engine was closed; make a new one.")
        self._channel.close()

    async def wait_closed(self) -> None:
        """Return when the broker has received everything."""
        await self._channel.wait_closed()

    # what comes

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._calls.answer(0, outputs.utility_output)
            return
        for ended in outputs.finished:
            self._media.drop(ended.handle)
        self._events.append(outputs)
        self._announce()

    def _on_status(self, states: CoreStates) -> None:
        self._statuses = {status.engine_index: status for status in states.statuses}
        self._status_at = time.monotonic()
        if states.is_open:
            self._opened.set()

    def _on_call(self, call: UtilityRequest) -> None:
        task = asyncio.ensure_future(self._answer(call))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, call: UtilityRequest) -> None:
        try:
            result = await self.answerers[call.method](call.args)
            answer = UtilityOutput.of_result(call.call_id, result)
        except Exception as error:
            logger.error("%s failed.", call.method, exc_info=error)
            answer = UtilityOutput.of_failure(call.call_id, error)
        self._channel.send(wire.ANSWER, answer)

    def _die(self, why: str) -> None:
        if self._error is None:
            self._error = EngineDeadError(why)
        self._calls.fail(0, EngineError(str(self._error)))
        # who waits for the cores to open has to see that they never will
        self._opened.set()
        self._announce()

    def _announce(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _require_open(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    def set_up(self) -> None:
        self.is_up = True
        self.report()

    def _report_again(self) -> None:
        self.report()
        self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report_again)
