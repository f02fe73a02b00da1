"""Joins several API servers to the cores of one engine: the owner's side.

One process owns the cores, with their supervisor and its journal, and answers no HTTP. Each API
server has the front end of an engine in itself (text to ids, ids to text) and speaks to the hub
through the pipe that it was started with. The numbers above `CLIENT_SHIFT` of a handle say which
life of which server gave it, so nothing needs renaming on the way.
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
from quire.engine.control_verbs import UTILITIES
from quire.engine.shared_cores import broker_messages as wire
from quire.engine.shared_cores.broker_messages import (
    CoreStates,
    MetricsNow,
    ServerReport,
    Sign,
)
from quire.engine.shared_cores.split_outputs import outputs_by_client
from quire.engine.stats.engine_stats import EngineStats
from quire.engine.stats.step_stats import IterationStats
from quire.engine.wire.channel import Channel
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import (
    CLIENT_SHIFT,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    UtilityOutput,
    UtilityRequest,
)
from quire.errors import EngineDeadError, EngineError, InvalidParameter

logger = logging.getLogger(__name__)

STATUS_S = 0.5
GATHER_S = 2.0
"""So long may a server take to answer; one that does not is left out."""
MOST_UNSENT_BYTES = 256 * 2**20
"""A server that lets so much lie does not read any more."""


class ApiServerConnection:
    """One life of an API server at the hub. `live` are its requests in the cores, with the lengths
    of their prompts. `is_up`: it takes connections. `last_sign`: when it was last heard of.

    `on_lost` is called when its channel is closed.
    """

    def __init__(self, hub: CoreBroker, client_index: int, on_lost: Callable[[], None]) -> None:
        self.client_index = client_index
        self.live: dict[int, int] = {}
        self.is_up = False
        self.last_sign = time.monotonic()
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self._hub = hub
        self._on_lost = on_lost
        self.channel = Channel(
            {
                wire.ADD: (EngineCoreRequest, self._on_add),
                wire.ABORT: (list[int], self._on_abort),
                wire.CALL: (UtilityRequest, self._on_call),
                wire.FIGURES: (ServerReport, hub.take_figures),
                wire.SIGN: (Sign, self._on_sign),
                wire.ANSWER: (UtilityOutput, self._on_answer),
            },
            self._on_close,
        )

    def _on_add(self, request: EngineCoreRequest) -> None:
        if request.handle >> CLIENT_SHIFT != self.client_index:
            raise EngineError("a handle of another server came")
        if not request.continues:
            self.live[request.handle] = len(request.prompt_token_ids)
        elif request.handle not in self.live:
            return
        self._hub.add(self, request)

    def _on_abort(self, handles: list[int]) -> None:
        mine = [handle for handle in handles if self.live.pop(handle, None) is not None]
        self._hub.abort(mine)

    def _on_call(self, question: UtilityRequest) -> None:
        self._hub.spawn(self._hub.answer(self, question))

    def _on_sign(self, sign: Sign) -> None:
        self.last_sign = time.monotonic()
        self.is_up = sign.is_up

    def _on_answer(self, answer: UtilityOutput) -> None:
        future = self.answers.pop(answer.call_id, None)
        if future is not None and not future.done():
            future.set_result(answer.result)

    def _on_close(self) -> None:
        self._hub.leave(self)
        for future in self.answers.values():
            future.cancel()
        self._on_lost()


class CoreBroker:
    """Gives requests of all seats to the cores, and each seat what is its own of every step.

    `client` is the engine's, supervised as it should be; `stats` are its figures, whoever counted
    them. For one event loop. A handle of a seat that is gone is dropped from the cores.
    """

    def __init__(
        self, client: AsyncEngineCoreClient, stats: EngineStats, log_interval_s: float | None = None
    ) -> None:
        """`log_interval_s`: how often the figures are logged (None: never)."""
        self._log_interval_s = log_interval_s
        self._client = client
        self._stats = stats
        self.seats: dict[int, ApiServerConnection] = {}
        self._indices = itertools.count(1)
        self._call_ids = itertools.count(1)
        self._tasks: set[asyncio.Future[Any]] = set()
        self._rejected: Counter[str] = Counter()
        self._is_open = False

    def new_index(self) -> int:
        """The client index of the next life of a server."""
        return next(self._indices)

    async def join(
        self, client_index: int, pipe: socket.socket, on_lost: Callable[[], None]
    ) -> ApiServerConnection:
        """Let a server in that has this index, at the other end of `pipe`."""
        seat = self.seats[client_index] = ApiServerConnection(self, client_index, on_lost)
        await seat.channel.open(pipe)
        self._tell_status(seat)
        return seat

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineDeadError when the cores are dead for good, which
        every seat is told.
        """
        self._is_open = True
        ticking = asyncio.gather(self._tick(), self._log())
        try:
            while True:
                self._route(await self._client.get_output())
                await asyncio.sleep(0)  # let servers in: under load outputs are always there
        except EngineDeadError as error:
            for seat in self.seats.values():
                seat.channel.send(wire.DEAD, str(error))
            raise
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the rest."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # requests

    def add(self, seat: ApiServerConnection, request: EngineCoreRequest) -> None:
        """Give a request to the cores; one that they cannot have ends with an error."""
        try:
            self._client.add_request(request)
        except EngineDeadError:
            return  # `run` tells the seat
        except EngineError as error:
            seat.live.pop(request.handle, None)
            end = Finished(request.handle, FinishReason.ERROR, message=str(error))
            outputs = EngineCoreOutputs(finished=[end], timestamp=time.monotonic())
            seat.channel.send(wire.OUTPUTS, outputs)

    def abort(self, handles: list[int]) -> None:
        """Have the cores drop requests."""
        if handles:
            self._client.abort_requests(handles)

    def leave(self, seat: ApiServerConnection) -> None:
        """A server is gone, and nobody waits for its streams."""
        self.seats.pop(seat.client_index, None)
        live, seat.live = list(seat.live), {}
        try:
            self.abort(live)
        except EngineDeadError:
            logger.info("The engine cores have exited as well.")

    def _route(self, outputs: EngineCoreOutputs) -> None:
        self._note_step(outputs)
        for client_index, part in outputs_by_client(outputs).items():
            seat = self.seats.get(client_index)
            if seat is None:
                continue
            for end in part.finished:
                seat.live.pop(end.handle, None)
            part.stats = None
            seat.channel.send(wire.OUTPUTS, part)
            if seat.channel.num_unsent_bytes > MOST_UNSENT_BYTES:
                logger.error("Disconnecting a slow API server: it does not read its outputs.")
                seat.channel.abort()

    def _note_step(self, outputs: EngineCoreOutputs) -> None:
        """What only who sees the whole step can count; the rest comes from the seats."""
        if outputs.stats is None and not outputs.token_ids:
            return
        computed = len(outputs.token_ids)
        for started in outputs.started:
            seat = self.seats.get(started.handle >> CLIENT_SHIFT)
            if seat is not None and started.handle in seat.live:
                computed += seat.live[started.handle] - started.num_cached_tokens
        step = IterationStats(time.time(), num_step_tokens=computed)
        self._stats.record(outputs.stats, step, outputs.engine_index)

    # questions

    async def answer(self, seat: ApiServerConnection, question: UtilityRequest) -> None:
        """Answer a server."""
        try:
            result = await self._perform(seat, question)
        except Exception as error:
            text = str(error) or type(error).__name__
            reply = UtilityOutput(question.call_id, text, None, type(error).__name__)
        else:
            reply = UtilityOutput(question.call_id, None, result)
        seat.channel.send(wire.REPLY, reply)

    async def _perform(self, seat: ApiServerConnection, question: UtilityRequest) -> object:
        method, args = question.method, question.args
        if method == wire.METRICS:
            await self._gather(wire.FLUSH, [])
            return MetricsNow(self._stats.since, self._stats.metrics(""))
        if method == wire.ABORT_SHOWN:
            return sum(await self._gather(wire.ABORT_SHOWN, args, but=seat))
        if method == wire.SCALE:
            await self._client.scale(*args)
            self._tell_statuses()
            return None
        if method not in UTILITIES:
            raise InvalidParameter("method", method, f"there is {', '.join(sorted(UTILITIES))}")
        return await self._client.call(Utility(method, tuple(args), question.timeout_s))

    async def _gather(
        self, method: str, args: list[Any], but: ApiServerConnection | None = None
    ) -> list[Any]:
        """The answers of all other seats, those left out that do not give one in time."""
        asked = [self._ask(seat, method, args) for seat in self.seats.values() if seat is not but]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=GATHER_S)
        for future in late:
            future.cancel()
        answers = [future.result() for future in done if not future.cancelled()]
        return [answer for answer in answers if answer is not None]

    def _ask(self, seat: ApiServerConnection, method: str, args: list[Any]) -> asyncio.Future[Any]:
        call_id = next(self._call_ids)
        future = seat.answers[call_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: seat.answers.pop(call_id, None))
        seat.channel.send(wire.ASK, UtilityRequest(call_id, method, args))
        return future

    def take_figures(self, figures: ServerReport) -> None:
        """Count what a server has counted."""
        for engine_index, stats in figures.by_core:
            self._stats.record(None, stats, engine_index)
        if figures.num_rejected:
            self._rejected.update(figures.num_rejected)
            self._stats.note_rejected(self._rejected)
        if figures.sleep_level is not None:
            self._stats.note_sleep(None if figures.sleep_level < 0 else figures.sleep_level)

    # states

    async def _tick(self) -> None:
        while True:
            self._tell_statuses()
            await asyncio.sleep(STATUS_S)

    async def _log(self) -> None:
        while self._log_interval_s is not None:
            await asyncio.sleep(self._log_interval_s)
            self._stats.log()

    def _tell_statuses(self) -> None:
        for seat in self.seats.values():
            self._tell_status(seat)

    def _tell_status(self, seat: ApiServerConnection) -> None:
        client = self._client
        statuses = [client.core_status(index) for index in client.engine_indices]
        seat.channel.send(wire.STATUS, CoreStates(statuses, self._is_open))
