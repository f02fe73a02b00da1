"""Sending requests to a server and noting when what came back: the client of `quire bench serve`.

A request's moments follow what other load generators call them. Time to first token: until the
first event that has a choice. Inter-token latency: between two such events. End-to-end latency:
until the last one.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LINE_LIMIT = 1 << 22
"""Bytes of one event; a longer one is a failure."""


@dataclass(slots=True)
class Outcome:
    """The result of a request. Times in seconds; `start` since the load began.

    `latency` and `ttft` are 0 for a request that failed, `error` says why it did.
    """

    start: float
    prompt_len: int
    output_len: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 without such a token."""
        after_first = self.output_len - 1
        return (self.latency - self.ttft) / after_first if after_first > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Arrival of requests: `rate` a second (inf: all at once) and at most `concurrency` at a time.

    burstiness is the shape of the gamma distribution of the times between two arrivals: 1 is a
    Poisson process, less is in bursts, more is even.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0

    def arrivals(self, count: int) -> list[float]:
        """Times at which requests are due, in seconds since the start."""
        if math.isinf(self.rate):
            return [0.0] * count
        # a generator of its own: the same seed gives the same load
        draw = random.Random(self.seed)
        scale = 1.0 / (self.rate * self.burstiness)
        now, due = 0.0, []
        for _ in range(count):
            due.append(now)
            now += draw.gammavariate(self.burstiness, scale)
        return due


class Client:
    """A session with one server's streaming endpoint."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            # its default of 100 connections would bound the load
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LINE_LIMIT,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, body: dict[str, Any], prompt_len: int, begun: float) -> Outcome:
        """Send one streaming request and read it to the end; failures are in the outcome."""
        start = time.perf_counter()
        outcome = Outcome(start - begun, prompt_len)
        try:
            await self._read(body, start, outcome)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        return outcome

    async def _read(self, body: dict[str, Any], start: float, outcome: Outcome) -> None:
        pieces: list[str] = []
        last = start
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                outcome.error = f"{response.status}: {(await response.text())[:500]}"
                return
            async for event in _events(response.content):
                if "error" in event:
                    outcome.error = json.dumps(event["error"])[:500]
                    return
                if event.get("choices"):
                    now = time.perf_counter()
                    if last is start:
                        outcome.ttft = now - start
                    else:
                        outcome.gaps.append(now - last)
                    last = now
                    pieces.append(_text(event["choices"][0]))
                if event.get("usage"):
                    outcome.output_len = event["usage"]["completion_tokens"]
                    outcome.prompt_len = event["usage"]["prompt_tokens"]
        outcome.latency = last - start
        outcome.text = "".join(pieces)
        if last is start:
            outcome.error = "the stream had no tokens"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON values of server-sent events, up to [DONE]."""
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _text(choice: dict[str, Any]) -> str:
    if "delta" in choice:
        return choice["delta"].get("content") or ""
    return choice.get("text") or ""


async def run_load(
    client: Client,
    bodies: Sequence[tuple[dict[str, Any], int]],
    shape: RequestShape,
    on_end: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Send (body, prompt length) pairs as `shape` says: outcomes in the order of the bodies, and
    the seconds from the first sending to the last end.
    """
    slots = asyncio.Semaphore(shape.concurrency or len(bodies))
    begun = time.perf_counter()

    async def one(body: dict[str, Any], length: int, due: float) -> Outcome:
        # to a moment since the start and not for a while: late requests do not delay those after
        # them
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        async with slots:
            outcome = await client.send(body, length, begun)
        on_end(outcome)
        return outcome

    due = shape.arrivals(len(bodies))
    tasks = [one(body, length, at) for (body, length), at in zip(bodies, due, strict=True)]
    outcomes = await asyncio.gather(*tasks)
    return list(outcomes), time.perf_counter() - begun
