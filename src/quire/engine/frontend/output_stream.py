"""The outputs that a caller of `AsyncLLM` has not fetched yet, merged into one per request."""

from __future__ import annotations

import asyncio
from typing import Protocol

from quire.engine.counterparts import HasCounterparts
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind
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
        """The kind of the outputs that are merged."""
        self._is_delta = kind is RequestOutputKind.DELTA

    def note(self, completion: Unfetched) -> None:
        """Note that a completion has new tokens."""
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
        """Return everything new as one output, None if there is nothing. Raises an error that was
        put.
        """
        if self._error is not None:
            raise self._error
        output = self._output
        if output is not None:
            self._output = None
        news = self._news
        while news:
            completion = news.pop(next(iter(news)))
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
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
