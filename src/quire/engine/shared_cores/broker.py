"""Joins several API servers to the cores of one engine: the owner's side.

One process owns the cores, with their supervisor and its journal, and answers no HTTP. Each API
server has a front end of its own (text to ids, ids to text) and a connection to the broker: the
pipe that it was started with, a socket pair. The bits above `CLIENT_SHIFT` of a handle are the
index of one incarnation of one server, so handles stay the same on the way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.client.pending_calls import PendingCalls
from quire.engine.control_verbs import UTILITIES
from quire.engine.shared_cores import broker_messages as wire
from quire.engine.shared_cores.broker_messages import CoreStates, MetricsNow, ServerReport
from quire.engine.shared_cores.split_outputs import outputs_by_client
from quire.engine.stats.engine_stats import EngineStats
from quire.engine.stats.step_stats import IterationStats
from quire.engine.wire.channel import Channel
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import (
    CLIENT_SHIFT,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityOutput,
    UtilityRequest,
)
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.errors import EngineDeadError, EngineError, InvalidParameter
from quire.processes.codec import BadMessage

logger = logging.getLogger(__name__)

STATUS_S = 0.5
GATHER_S = 2.0
"""Seconds that a server may take to answer; later answers are left out."""
MOST_UNSENT_BYTES = 256 * 2**20
"""A server with more unread output than this is disconnected."""


class ApiServerConnection:
    """One incarnation of an API server at the broker. `live` are its requests in the cores, with
    the lengths of their prompts. `is_up`: it takes connections. `last_sign`: when its last
    heartbeat came.

    `on_lost` is called when its channel is closed.
    """

    def __init__(self, broker: CoreBroker, client_index: int, on_lost: Callable[[], None]) -> None:
        self.client_index = client_index
        self.live: dict[int, int] = {}
        self.is_up = False
        self.last_sign = time.monotonic()
        self._broker = broker
        self._on_lost = on_lost
        self.channel = Channel(
            {
                wire.ADD: (EngineCoreRequest, self._on_add),
                wire.ABORT: (list[int], self._on_abort),
                wire.UTILITY: (UtilityRequest, self._on_call),
                wire.REPORT: (ServerReport, self._on_report),
                wire.ANSWER: (UtilityOutput, self._on_answer),
            },
            self._on_close,
            {wire.ADD: self._refuse_add, wire.UTILITY: self._refuse_call},
        )

    def _on_add(self, request: EngineCoreRequest) -> None:
        # a server that goes wrong must not reach the requests of others
        if request.handle >> CLIENT_SHIFT != self.client_index:
            self.end(request.handle, "the handle is not one of this server")
            return
        if not request.continues:
            self.live[request.handle] = len(request.prompt_token_ids)
        elif request.handle not in self.live:
            return
        self._broker.add(self, request)

    def _refuse_add(self, handle: int, why: BadMessage) -> None:
        if self.live.pop(handle, None) is not None:  # it was more input for one that runs
            self._broker.abort([handle])
        self.end(handle, f"the request cannot be decoded: {why}")

    def _refuse_call(self, call_id: int, why: BadMessage) -> None:
        output = UtilityOutput.of_failure(call_id, why)
        self.channel.send(wire.OUTPUTS, EngineCoreOutputs(utility_output=output))

    def end(self, handle: int, text: str) -> None:
        """Tell the server that a request has ended by an error."""
        end = Finished(handle, FinishReason.ERROR, message=text)
        outputs = EngineCoreOutputs(finished=[end], timestamp=time.monotonic())
        self.channel.send(wire.OUTPUTS, outputs)

    def _on_abort(self, handles: list[int]) -> None:
        # of its own alone, as above
        mine = [handle for handle in handles if self.live.pop(handle, None) is not None]
        self._broker.abort(mine)

    def _on_call(self, call: UtilityRequest) -> None:
        self._broker.spawn(self._broker.answer(self, call))

    def _on_report(self, report: ServerReport) -> None:
        self.last_sign = time.monotonic()
        self.is_up = report.is_up
        self._broker.count(report)

    def _on_answer(self, answer: UtilityOutput) -> None:
        self._broker.calls.answer(self.client_index, answer)

    def _on_close(self) -> None:
        self._broker.leave(self)
        self._on_lost()


class CoreBroker:
    """Sends the requests of all servers to the cores, and each server its part of every step.

    `client` is the client of the cores, with its supervisor; `stats` are the statistics of all
    servers. For one event loop. The requests of a server that has exited are aborted.
    """

    def __init__(
        self, client: AsyncEngineCoreClient, stats: EngineStats, log_interval_s: float | None = None
    ) -> None:
        """`log_interval_s`: how often the statistics are logged (None: never)."""
        self._log_interval_s = log_interval_s
        self._client = client
        self._stats = stats
        self.servers: dict[int, ApiServerConnection] = {}
        self._indices = itertools.count(1)
        self.calls = PendingCalls()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._rejected: Counter[str] = Counter()
        self._media = (0, 0)
        self._is_open = False

    def new_index(self) -> int:
        return next(self._indices)

    async def join(
        self, client_index: int, pipe: socket.socket, on_lost: Callable[[], None]
    ) -> ApiServerConnection:
        """Connect to the server with this index at the other end of `pipe`."""
        server = self.servers[client_index] = ApiServerConnection(self, client_index, on_lost)
        await server.channel.open(pipe)
        self._send_status(server)
        return server

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineDeadError, after sending it, once cores are dead."""
        self._is_open = True
        ticking = asyncio.gather(self._tick(), self._log())
        try:
            while True:
                self._route(await self._client.get_output())
                await asyncio.sleep(0)  # read from servers: under load there are always outputs
        except EngineDeadError as error:
            for server in self.servers.values():
                server.channel.send(wire.DEAD, str(error))
            raise
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # requests

    def add(self, server: ApiServerConnection, request: EngineCoreRequest) -> None:
        """Send a request to the cores; one that they cannot take ends with an error."""
        try:
            self._client.add_request(request)
        except EngineDeadError:
            return  # `run` tells the server
        except EngineError as error:
            server.live.pop(request.handle, None)
            server.end(request.handle, str(error))

    def abort(self, handles: list[int]) -> None:
        if handles:
            self._client.abort_requests(handles)

    def shut_down(self, server: ApiServerConnection) -> None:
        """Have a server stop: the first time it drains its requests, the second it aborts them."""
        call_id, _ = self.calls.begin(Utility(wire.SHUTDOWN), [server.client_index])
        server.channel.send(wire.UTILITY, UtilityRequest(call_id, wire.SHUTDOWN, []))

    def leave(self, server: ApiServerConnection) -> None:
        """A server has exited: abort its requests."""
        self.servers.pop(server.client_index, None)
        self.calls.fail(server.client_index, EngineError("The API server has exited."))
        live, server.live = list(server.live), {}
        if live:
            logger.error("Aborting %d requests of an API server that has exited.", len(live))
        try:
            self.abort(live)
        except EngineDeadError:
            logger.info("The engine cores have exited as well.")

    def _route(self, outputs: EngineCoreOutputs) -> None:
        self._note_step(outputs)
        for client_index, part in outputs_by_client(outputs).items():
            server = self.servers.get(client_index)
            # it has exited, and `leave` has aborted its requests
            if server is None:
                continue
            for end in part.finished:
                server.live.pop(end.handle, None)
            # whole steps are counted above, once for all servers
            part.stats = None
            server.channel.send(wire.OUTPUTS, part)
            if server.channel.num_unsent_bytes > MOST_UNSENT_BYTES:
                logger.error("Disconnecting a slow API server: it does not read its outputs.")
                server.channel.abort()

    def _note_step(self, outputs: EngineCoreOutputs) -> None:
        """Count what only the whole step shows; servers report the rest."""
        if outputs.stats is None and not outputs.token_ids:
            return
        computed = len(outputs.token_ids)
        for started in outputs.started:
            server = self.servers.get(started.handle >> CLIENT_SHIFT)
            if server is not None and started.handle in server.live:
                computed += server.live[started.handle] - started.num_cached_tokens
        step = IterationStats(time.time(), num_step_tokens=computed)
        self._stats.record(outputs.stats, step, outputs.engine_index)

    # calls

    async def answer(self, server: ApiServerConnection, call: UtilityRequest) -> None:
        try:
            output = UtilityOutput.of_result(call.call_id, await self._perform(server, call))
        except Exception as error:
            output = UtilityOutput.of_failure(call.call_id, error)
        server.channel.send(wire.OUTPUTS, EngineCoreOutputs(utility_output=output))

    async def _perform(self, server: ApiServerConnection, call: UtilityRequest) -> object:
        method, args = call.method, call.args
        if method == wire.METRICS:
            await self._gather(wire.FLUSH, [])
            return MetricsNow(self._stats.since, self._stats.metrics(""))
        if method == wire.ABORT_SHOWN:
            return sum(await self._gather(wire.ABORT_SHOWN, args, but=server))
        if method == wire.SCALE:
            await self._client.scale(*args)
            self._send_statuses()
            return None
        if method == wire.IS_SCALING:
            return await self._client.is_scaling()
        if method not in UTILITIES:
            raise InvalidParameter("method", method, f"there is {', '.join(sorted(UTILITIES))}")
        return await self._client.call(Utility(method, tuple(args), call.timeout_s))

    async def _gather(
        self, method: str, args: list[Any], but: ApiServerConnection | None = None
    ) -> list[Any]:
        """The answers of the other servers; those that are late are left out."""
        asked = [
            self._ask(server, method, args) for server in self.servers.values() if server is not but
        ]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=GATHER_S)
        for future in late:
            future.cancel()
        answers = [future.result() for future in done if future.exception() is None]
        return [answer for answer in answers if answer is not None]

    def _ask(
        self, server: ApiServerConnection, method: str, args: list[Any]
    ) -> asyncio.Future[Any]:
        call_id, future = self.calls.begin(Utility(method, tuple(args)), [server.client_index])
        server.channel.send(wire.UTILITY, UtilityRequest(call_id, method, args))
        return asyncio.wrap_future(future)

    def count(self, report: ServerReport) -> None:
        for engine_index, stats in report.by_core:
            self._stats.record(None, stats, engine_index)
        if report.num_rejected:
            self._rejected.update(report.num_rejected)
            self._stats.note_rejected(self._rejected)
        if report.media is not None:
            self._media = (self._media[0] + report.media[0], self._media[1] + report.media[1])
            self._stats.media_counts = lambda: self._media
        if report.sleep_level is not None:
            self._stats.note_sleep(None if report.sleep_level < 0 else report.sleep_level)
        for note in report.operations:
            self._stats.note_operation(note)

    # states

    async def _tick(self) -> None:
        while True:
            self._send_statuses()
            await asyncio.sleep(STATUS_S)

    async def _log(self) -> None:
        while self._log_interval_s is not None:
            await asyncio.sleep(self._log_interval_s)
            self._stats.log()

    def _send_statuses(self) -> None:
        for server in self.servers.values():
            self._send_status(server)

    def _send_status(self, server: ApiServerConnection) -> None:
        client = self._client
        statuses = [client.core_status(index) for index in client.engine_indices]
        server.channel.send(wire.STATUS, CoreStates(statuses, self._is_open))
