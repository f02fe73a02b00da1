"""The outputs of requests on their way to callers of `AsyncLLM`: a mailbox for each request with
those that are not fetched yet, and streams of them, merged or awaited as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, Self

from quire.distributed.peers.params import PARAMS
from quire.engine.counterparts import HasCounterparts
from quire.errors import EngineGenerateError, RequestError
from quire.lora.request import ADAPTER_FAILED
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind
from quire.params.structured import GRAMMAR_FAILED, NO_TOKEN_LEFT
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput


class Unfetched(Protocol):
    """A completion that has something new (`RequestState`)."""

    handle: int
    is_ended: bool

    def news(self) -> RequestOutput | None:
        """Return the output with everything new since the last call."""
        ...


class RequestOutputCollector(HasCounterparts):
    """The mailbox of one request: filled by the output handler, emptied by one consumer.

    A completion with new tokens is only noted; its output is made when the consumer fetches it. A
    slow consumer therefore costs neither time nor memory besides the tokens themselves: it gets
    everything that it has missed as one output. An error replaces everything that was not fetched.

    `request_id` is the engine's own id, by which `AsyncLLM.abort(..., internal=True)` ends this
    request alone; `external_req_id` is the caller's, which outputs carry.
    """

    def __init__(
        self, output_kind: RequestOutputKind, request_id: str, external_req_id: str
    ) -> None:
        self.request_id = request_id
        self.external_req_id = external_req_id
        self.traceparent: str | None = None
        """The `traceparent` of the request's span, with tracing on."""
        self.survives = True
        """Whether the request goes on after the death of its core."""
        self.set_output_kind(output_kind)
        self._news: dict[int, Unfetched] = {}
        self._output: RequestOutput | None = None
        self._pooled: PoolingRequestOutput[PoolingOutput] | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def set_output_kind(self, kind: RequestOutputKind) -> None:
        self._is_delta = kind is RequestOutputKind.DELTA

    def note(self, completion: Unfetched) -> None:
        if not self._is_closed:
            self._news[completion.handle] = completion
            if self._waiter is not None:
                self._wake()

    def put(
        self, output: RequestOutput | PoolingRequestOutput[PoolingOutput] | BaseException
    ) -> None:
        """Merge an output with the unfetched ones, or replace them by an error."""
        if self._is_closed:
            return
        if isinstance(output, BaseException):
            self._error = output
        elif isinstance(output, PoolingRequestOutput):
            self._pooled = output
        elif self._output is None:
            self._output = output
        else:
            self._output.add(output, aggregate=self._is_delta)
        self._wake()

    def get_nowait(self) -> RequestOutput | None:
        """Everything new as one output; None: there is nothing. Raises an error that was put."""
        if self._error is not None:
            raise self._error
        output = self._output
        if output is not None:
            self._output = None
        news = self._news
        while news:
            completion = news.pop(next(iter(news)))
            # the last output of one that has ended was put, and has everything
            part = None if completion.is_ended else completion.news()
            if output is None:
                output = part
            elif part is not None:
                output.add(part, aggregate=self._is_delta)
        return output

    async def get_pooled(self) -> PoolingRequestOutput[PoolingOutput]:
        """Wait for the one output of a pooling request. Raises an error that was put."""
        while self._pooled is None:
            if self._error is not None:
                raise self._error
            await self._arrival()
        return self._pooled

    async def get(self) -> RequestOutput:
        """Wait until there is something new, and return it like `get_nowait`."""
        while (output := self.get_nowait()) is None:
            await self._arrival()
        return output

    def _arrival(self) -> asyncio.Future[None]:
        """A future that is done at the next arrival; for one consumer, while nothing is here."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def close(self) -> None:
        """Keep nothing from now on: the consumer is gone."""
        self._is_closed = True
        self._news.clear()
        self._output = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        # a consumer that was cancelled leaves a waiter that is done
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


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
    for stream in streams:
        await stream.aclose()


async def merged(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams by number; an exception ends all. The caller closes them."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # bounded: what a slow caller does not fetch stays in the mailboxes, which merge it
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
    if text.startswith(PARAMS):
        return RequestError(text, parameter=PARAMS)
    return EngineGenerateError(text)
