"""The outputs of one or several engine requests: merged while they stream, or awaited as a whole. A
client that disconnects ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Self, TypeVar

from starlette.requests import ClientDisconnect, Request

from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.errors import EngineGenerateError, RequestError
from quire.lora.request import ADAPTER_FAILED
from quire.outputs import RequestOutput
from quire.params.structured import GRAMMAR_FAILED, NO_TOKEN_LEFT
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.server.http.json_body import until_disconnected

T = TypeVar("T")


class Outputs:
    """The outputs of one request that is in the engine, to the last.

    Unlike an async generator it ends its request when it is closed before its first output.
    """

    def __init__(
        self, collector: RequestOutputCollector, abort: Callable[[], Awaitable[None]]
    ) -> None:
        self._collector = collector
        self._abort = abort
        self._is_finished = False
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_finished:
            raise StopAsyncIteration
        output = self._collector.get_nowait() or await self._collector.get()
        self._is_finished = output.finished
        return output

    async def pooled(self) -> PoolingRequestOutput[PoolingOutput]:
        """The one output of a request that pools, which is closed then."""
        async with aclosing(self):
            return await self._collector.get_pooled()

    async def aclose(self) -> None:
        """End the request, if it has not ended, and drop its outputs. Idempotent."""
        if not self._is_closed:
            self._is_closed = self._is_finished = True
            await self._abort()


async def close_all(streams: Sequence[Outputs]) -> None:
    """Close every stream."""
    for stream in streams:
        await stream.aclose()


async def merged(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all streams as they come, with the number of their stream.

    The first exception ends all. The caller closes the streams.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(
        len(streams)
    )
    tasks = [asyncio.ensure_future(_feed(queue, *item)) for item in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()


async def _feed(
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]],
    index: int,
    stream: Outputs,
) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))


async def last_outputs(streams: Sequence[Outputs]) -> list[RequestOutput]:
    """The last output of each stream; all are closed then. Raises what `raise_error` does."""
    try:
        outputs = await asyncio.gather(*map(_last_output, streams))
    finally:
        await close_all(streams)
    for output in outputs:
        raise_error(output)
    return outputs


async def _last_output(stream: Outputs) -> RequestOutput:
    async with aclosing(stream):
        outputs = [output async for output in stream]
    return outputs[-1]


def raise_error(output: RequestOutput) -> None:
    """Raise for a completion that ended with an error: RequestError if that is due to its grammar,
    its adapter or parameters that contradict each other, else EngineGenerateError.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error":
            text = completion.error or "The generation failed."
            if text.startswith(GRAMMAR_FAILED):
                raise RequestError(text, parameter="structured_outputs")
            if text == NO_TOKEN_LEFT:
                raise RequestError(text)
            raise failure_of(text)


def failure_of(text: str) -> RequestError | EngineGenerateError:
    """The failure of a request that ended with this error in the engine."""
    if text.startswith(ADAPTER_FAILED):
        return RequestError(text, parameter="model")
    return EngineGenerateError(text)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; cancelled, and ClientDisconnect raised, when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
