"""Bodies that are sent piece by piece: a client that disconnects, or reads nothing, ends them.
Those of server-sent events also carry empty lines while they are idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.http.in_flight import until_disconnected

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b"\n\n"
"""An event without a field, which clients ignore (HTML standard, 9.2.6). A comment would serve as
well, but some clients strip each piece that they read, and take it for the beginning of the next.
"""


EventData = dict[str, Any]
"""An event whose JSON has its name as `type`."""


def event(data: bytes, name: str | None = None) -> bytes:
    """One event with the one-line payload `data`."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class PieceStream(Response):
    """A response whose body is the pieces that `pieces` yields.

    When the client disconnects the generator is closed where it waits. With `keep_alive_s` 0
    nothing is sent while idle. A client that reads nothing for `stall_s` is disconnected.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        *,
        media_type: str,
        keep_alive_s: float = 0.0,
        stall_s: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, headers, media_type)
        # Starlette has set the length of an empty body; without one the connection sends chunks
        del self.headers["content-length"]
        self._pieces = pieces
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._last_sent = 0.0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: dict[str, Any] = {"type": "http.response.start", "status": self.status_code}
        tasks: list[asyncio.Future[None]] = []
        try:
            await send({**start, "headers": self.raw_headers})
            tasks.append(asyncio.ensure_future(self._send(send)))
            tasks.append(asyncio.ensure_future(until_disconnected(receive)))
            tasks.append(asyncio.ensure_future(self._watch(send)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(*tasks)
            await self._pieces.aclose()
            await self.on_end()
        # a client that is gone ends the stream without an error, but a failure of the generator
        # belongs in the log of requests
        if not tasks[0].cancelled():
            tasks[0].result()

    async def on_end(self) -> None:
        """Called when the last piece is sent, or the client is gone."""

    async def _send(self, send: Send) -> None:
        async for piece in self._pieces:
            await self._put(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, piece: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._is_sending = False
        self._last_sent = asyncio.get_running_loop().time()

    async def _watch(self, send: Send) -> None:
        """Send empty lines while idle; return when the client has read nothing for too long."""
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        # at least once in the time that a stalled client has, also where nothing is sent while idle
        period = min(self._keep_alive_s or self._stall_s, self._stall_s)
        while True:
            # the first value is negative while a piece is being sent: then the client is looked at
            # now and then, not in a busy loop
            await asyncio.sleep(max(self._last_sent + period - clock(), 0.05 * period))
            silent_s = clock() - self._last_sent
            if self._is_sending:
                if silent_s >= self._stall_s:
                    return
            elif 0 < self._keep_alive_s <= silent_s:
                await self._put(send, _KEEP_ALIVE)


class EventStream(PieceStream):
    """The events that `events` yields; `on_end` is called at the end in any case."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        on_end: Callable[[], Awaitable[None]],
        keep_alive_s: float = 0.0,
        stall_s: float = 120.0,
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            keep_alive_s=keep_alive_s,
            stall_s=stall_s,
            # nginx collects a proxied reply, unless this header of its own says not to
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._end = on_end

    async def on_end(self) -> None:
        await self._end()


async def _cancel(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
