"""uvicorn's HTTP protocol with bounds on how large a request's head may be and how long it may take
to come.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


def bounded_protocol(max_header_bytes: int, header_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)`.

    A head above `max_header_bytes` (request line and headers) is answered with 431; a connection
    that has not sent a whole head `header_timeout_s` after it began is closed.
    """

    class BoundedProtocol(_Bounded):
        _max_header_bytes = max_header_bytes
        _header_timeout_s = header_timeout_s

    return BoundedProtocol


class _Bounded(HttpToolsProtocol):
    _max_header_bytes: int
    _header_timeout_s: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_bytes = self._dripped_bytes = 0
        self._is_in_head = False
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        waits_for_more = self._is_in_head
        super().data_received(data)
        if waits_for_more and self._is_in_head:
            # one header that never ends is reported by nobody
            self._dripped_bytes += len(data)
            self._check(self._dripped_bytes)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._header_bytes = self._dripped_bytes = 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._disarm()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        self._check(self._header_bytes)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_header_bytes and not self._is_refused:
            self._is_refused = True
            self.transport.write(
                STATUS_LINE[431] + b"connection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.close()

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
