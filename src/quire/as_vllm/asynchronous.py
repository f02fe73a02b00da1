"""Threads and iterators of an event loop, as `vllm.utils.async_utils` has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def make_async(func: Callable[..., T], executor: Any = None) -> Callable[..., asyncio.Future[T]]:
    """A function that runs `func` in a thread; to be awaited."""

    def run(*args: Any, **kwargs: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(executor, partial(func, *args, **kwargs))

    return run


async def collect_from_async_generator(iterator: AsyncIterator[T]) -> list[T]:
    """All that comes of it."""
    return [item async for item in iterator]


async def merge_async_iterators(
    *iterators: AsyncIterator[T],
) -> AsyncIterator[tuple[int, T]]:
    """Merges what several iterators yield, by the number of each; closing it closes them."""
    waiting = {asyncio.ensure_future(anext(it)): number for number, it in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[number]))] = number
                yield number, item
    finally:
        await _close(waiting, iterators)


async def _close(
    waiting: Mapping[asyncio.Task[T], int], iterators: Sequence[AsyncIterator[T]]
) -> None:
    for future in waiting:
        future.cancel()
    # an iterator cannot be closed while its next item is awaited
    await asyncio.gather(*waiting, return_exceptions=True)
    for number in waiting.values():
        close = getattr(iterators[number], "aclose", None)
        if close is not None:
            await close()
