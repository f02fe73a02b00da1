"""Runs the prompts of one request that pools: a window of them at a time, so that a request of ten
thousand inputs leaves room for others, and results in the order of the inputs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from quire.engine.frontend.output_stream import Outputs, close_all, failure_of
from quire.errors import CapacityError, EngineGenerateError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.server.context import RequestName, Server
from quire.server.http.failures import Refusal
from quire.server.http.in_flight import while_connected
from quire.server.pooling.inputs import PoolingPrompt, naming
from quire.server.pooling.requests import PooledBody

T = TypeVar("T")
Numbers = np.ndarray[Any, np.dtype[np.float32]]

MOST_NUMBERS = 2**26
"""The most numbers of a reply: 256 MiB while they are collected."""


class Pooled:
    """An input's result: numbers, [D] or [n, D] for its tokens, and its prompt's length."""

    __slots__ = ("numbers", "num_tokens")

    def __init__(self, numbers: Numbers, num_tokens: int) -> None:
        self.numbers = numbers
        self.num_tokens = num_tokens


async def pooled(
    server: Server,
    request: Request,
    body: PooledBody,
    name: RequestName,
    prompts: AsyncGenerator[PoolingPrompt],
) -> AsyncGenerator[Pooled]:
    """The results of the prompts. The first error ends all that are in the engine, and so does
    closing the generator.

    A full queue is an error for the first prompt; later ones wait until those before them have
    ended. Raises EngineGenerateError for a prompt that failed in the engine.
    """
    running: deque[Outputs] = deque()
    index = 0
    try:
        async with aclosing(prompts):
            async for prompt in prompts:
                stream = None
                # the same prompt is tried again after a full queue
                while stream is None:
                    if len(running) >= server.pooling.window:
                        yield await _first(running)
                    key = f"{name.key}-{index}"
                    try:
                        with naming(body, prompt.place):
                            stream = await server.add(
                                request,
                                body,
                                key,
                                name.shown,
                                prompt.ids,
                                prompt.params,
                                prompt.media,
                            )
                    except CapacityError:
                        if not running:
                            raise
                        yield await _first(running)
                running.append(stream)
                index += 1
                await asyncio.sleep(0)  # many short inputs take as long as one that is not
        while running:
            yield await _first(running)
    finally:
        await close_all(running)


async def _first(running: deque[Outputs]) -> Pooled:
    """The result of the oldest request, which leaves `running`."""
    # taken out only afterwards: on cancellation it is still closed with the others
    output = await running[0].pooled()
    running.popleft()
    return _checked(output)


def _checked(output: PoolingRequestOutput[PoolingOutput]) -> Pooled:
    if output.error is not None:
        raise failure_of(output.error)
    numbers: Numbers = output.outputs.data
    # JSON has no infinity and no NaN, and a vector with one is of no use for any search
    if not np.isfinite(numbers).all():
        raise EngineGenerateError("The model's result is not finite.")
    return Pooled(numbers, len(output.prompt_token_ids))


async def collected(results: AsyncGenerator[Pooled]) -> list[Pooled]:
    """All results. Raises Refusal for more numbers than a reply may have."""
    found: list[Pooled] = []
    size = 0
    async with aclosing(results):
        async for result in results:
            size += result.numbers.size
            check_size(size)
            found.append(result)
    return found


def check_size(num_numbers: int) -> None:
    """Raise Refusal (400) for more numbers than a reply may have."""
    if num_numbers > MOST_NUMBERS:
        text = f"The reply would have more than {MOST_NUMBERS} numbers; send fewer inputs at once."
        raise Refusal(400, text, param="input")


async def in_time(request: Request, body: PooledBody, work: Awaitable[T]) -> T:
    """The result of `work`. Raises ClientDisconnect, and Refusal after `timeout_s`."""
    try:
        async with asyncio.timeout(body.timeout_s):
            return await while_connected(request, work)
    except TimeoutError:
        raise Refusal(504, f"The request took more than timeout_s={body.timeout_s:g}.") from None


async def all_pooled(
    server: Server,
    request: Request,
    body: PooledBody,
    name: RequestName,
    prompts: AsyncGenerator[PoolingPrompt],
) -> list[Pooled]:
    return await in_time(request, body, collected(pooled(server, request, body, name, prompts)))
