"""Running a batch: a number of requests at a time, each with its result written when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
from starlette.types import ASGIApp

from quire.engine.async_llm import AsyncLLM
from quire.server.batch.direct_call import DirectReply, post
from quire.server.batch.lines import BatchRequest, InvalidLine, Line, LineChecker
from quire.server.batch.results import BatchError, BatchResponse, BatchResult, Results
from quire.server.http.failures import ErrorBody, Refusal, error_json

_OK, _BAD, _BUSY, _FAILED = 200, 400, 503, 500


class BatchRun:
    """Sends requests to `app` of `engine`; `on_result` is called when a result is in the file."""

    def __init__(
        self,
        app: ASGIApp,
        engine: AsyncLLM,
        checker: LineChecker,
        results: Results,
        on_result: Callable[[], object],
    ) -> None:
        self._app = app
        self._engine = engine
        self._checker = checker
        self._results = results
        self._on_result = on_result
        self._num_asking = 0

    async def run(self, lines: Iterable[Line], concurrency: int) -> None:
        """Answer every line that has no result, `concurrency` at a time, begun in their order.

        Raises EngineDeadError when the engine dies for good; what has no result then gets none.
        """
        rest = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work(rest))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self, lines: Iterable[Line]) -> None:
        for line in lines:
            try:
                request = self._checker.request(line)
            except InvalidLine as error:
                if not self._results.holds(line):
                    body = error_json(Refusal(_BAD, str(error)))
                    self._finish(line, error.custom_id, DirectReply(_BAD, {}, body))
                await asyncio.sleep(0)  # so that many invalid lines do not block the loop
                continue
            if not self._results.holds(line):
                self._finish(line, request.custom_id, await self._answer(line, request))

    async def _answer(self, line: Line, request: BatchRequest) -> DirectReply:
        """The app's answer. While others are answered a full queue means to try again."""
        while True:
            self._num_asking += 1
            try:
                reply = await post(self._app, request.url, bytes(request.body), line.id)
            finally:
                self._num_asking -= 1
            # the lines that are left would all fail: without results they are answered by the next
            # run
            if reply.status >= _FAILED and self._engine.errored:
                raise self._engine.dead_error
            # alone it cannot be the queue of others that is full: waiting would not help
            if reply.status != _BUSY or not self._num_asking:
                return reply
            await asyncio.sleep(float(reply.headers.get("retry-after", "1")))

    def _finish(self, line: Line, custom_id: str | None, reply: DirectReply) -> None:
        response = BatchResponse(reply.status, line.id, msgspec.Raw(reply.body))
        error = None if reply.status == _OK else _error_of(reply)
        self._results.add(line, BatchResult(line.id, custom_id, response, error))
        self._on_result()


def _error_of(reply: DirectReply) -> BatchError:
    message = msgspec.json.decode(reply.body, type=ErrorBody).error.message
    return BatchError(str(reply.status), message)
