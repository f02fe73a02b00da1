"""Functions and constants of `vllm.utils` that programs use besides the engine."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

KiB_bytes, MiB_bytes, GiB_bytes = (1024**power for power in (1, 2, 3))
KB_bytes, MB_bytes, GB_bytes = (1000**power for power in (1, 2, 3))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def round_up(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """The largest multiple of y that is not above x."""
    return x // y * y


def as_list(maybe_list: Iterable[T]) -> list[T]:
    """The items as a list; a list itself."""
    return maybe_list if isinstance(maybe_list, list) else list(maybe_list)


def is_list_of(value: object, typ: Any, *, check: str = "first") -> bool:
    """Whether a value is a list whose first item, or with check="all" every item, is of a type. An
    empty list is.
    """
    if not isinstance(value, list):
        return False
    return all(isinstance(item, typ) for item in (value[:1] if check == "first" else value))


def chunk_list(lst: Sequence[T], chunk_size: int) -> Iterator[Sequence[T]]:
    """Parts of `chunk_size` items, the last one with what is left."""
    return (lst[at : at + chunk_size] for at in range(0, len(lst), chunk_size))


def resolve_obj_by_qualname(qualname: str) -> Any:
    """What `module.name` names."""
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)


def update_environment_variables(envs: dict[str, str]) -> None:
    """Set variables of this process."""
    os.environ.update(envs)


def kill_process_tree(pid: int) -> None:
    """Kill a process and all that it started, the youngest first."""
    import psutil

    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    for process in (*reversed(parent.children(recursive=True)), parent):
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue


def set_random_seed(seed: int | None) -> None:
    """Seed `random`, numpy and torch in this process; engines have a seed of their own."""
    if seed is None:
        return
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# addresses


def is_valid_ipv6_address(address: str) -> bool:
    """Whether a text is an address of IPv6."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def join_host_port(host: str, port: int) -> str:
    """host:port, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if is_valid_ipv6_address(host) else f"{host}:{port}"


def get_tcp_uri(ip: str, port: int) -> str:
    """tcp://host:port, as torch.distributed and ZeroMQ write it."""
    return f"tcp://{join_host_port(ip, port)}"


# asynchronous work


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
    """What comes of several, as it comes, with the number of the one that it is from. Those that
    have not ended are closed with this.
    """
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
    await asyncio.gather(*waiting, return_exceptions=True)
    for number in waiting.values():
        close = getattr(iterators[number], "aclose", None)
        if close is not None:
            await close()
