"""Connections to the server that takes streams over: HTTP by h11, which uvicorn brings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.errors import InvalidParameter

if TYPE_CHECKING:
    import h11

SILENT_S = 10.0
"""Seconds without a sign of life after which the other server counts as dead."""
ASK_S = 120.0
"""Seconds for an answer: both ends may have to read the model's files, for their digests."""
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 16
"""Bytes of a reply that is not a stream."""
_PATH = "/take_over"


class LinkLost(Exception):
    """The other server does not answer, or refuses. `status`: of the reply to whoever asked."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class DrainTarget:
    """Another server."""

    host: str
    port: int
    path: str
    has_tls: bool
    api_key: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str, api_key: str | None) -> DrainTarget:
        """The server at `url`. Raises InvalidParameter for what is not the address of one."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        has_more = parts.query or parts.fragment or parts.username is not None
        host = parts.hostname or ""
        is_address = parts.scheme in ("http", "https") and host and url.isascii()
        if not is_address or has_more:
            raise InvalidParameter("target", url, "the address of a server, http://host:port")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidParameter("api_key", "***", "printable ASCII characters")
        path = parts.path.rstrip("/") + _PATH
        return cls(host, port, path, parts.scheme == "https", api_key)

    async def ask(self, message: bytes) -> bool:
        """Whether the server has the same root. Raises LinkLost if it takes no streams."""
        async with contextlib.aclosing(self.follow(message, ASK_S)) as parts:
            found = b"".join([part async for part in parts])
        try:
            return bool(json.loads(found)["same_root"])
        except (ValueError, KeyError, TypeError):
            raise LinkLost("it is not a server of Quire") from None

    async def follow(self, message: bytes, silent_s: float | None = None) -> AsyncGenerator[bytes]:
        """Yield a message's reply. Raises LinkLost, also after `silent_s` (None: `SILENT_S`)."""
        import h11  # few servers are drained

        try:
            async with asyncio.timeout(SILENT_S):
                secure = ssl.create_default_context() if self.has_tls else None
                reader, writer = await asyncio.open_connection(self.host, self.port, ssl=secure)
        except (OSError, TimeoutError) as error:
            raise LinkLost(f"it cannot be reached ({error or 'no answer'})") from None
        try:
            connection = h11.Connection(h11.CLIENT)
            async with asyncio.timeout(SILENT_S):
                writer.write(self._sent(connection, message))
                await writer.drain()
            async for part in _reply(connection, reader, silent_s or SILENT_S):
                yield part
        except (OSError, TimeoutError) as error:
            raise LinkLost(f"the connection is lost ({error or 'no sign of life'})") from None
        except h11.ProtocolError as error:
            raise LinkLost(f"it does not speak HTTP ({error})") from None
        finally:
            writer.close()

    def _sent(self, connection: h11.Connection, message: bytes) -> bytes:
        import h11

        name = f"[{self.host}]" if ":" in self.host else self.host
        headers = [
            ("Host", f"{name}:{self.port}"),
            ("Content-Type", "application/octet-stream"),
            ("Content-Length", str(len(message))),
        ]
        if self.api_key is not None:
            headers.append(("Authorization", f"Bearer {self.api_key}"))
        head: Any = h11.Request(method="POST", target=self.path, headers=headers)
        events = (head, h11.Data(message), h11.EndOfMessage())
        return b"".join(connection.send(event) or b"" for event in events)


async def _reply(
    connection: h11.Connection, reader: asyncio.StreamReader, silent_s: float
) -> AsyncGenerator[bytes]:
    """The body of a reply that is one; raises LinkLost with the message of a refusal."""
    import h11

    status, refusal = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            async with asyncio.timeout(silent_s):
                connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status == 200:
            yield bytes(event.data)
        elif isinstance(event, h11.Data):
            refusal = (refusal + bytes(event.data))[:_MOST_BYTES]
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            if status != 200:
                raise LinkLost(_message_of(refusal, status), 409 if status == 409 else 502)
            return


def _message_of(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:1000]
    except (ValueError, KeyError, TypeError):
        return f"it answers {status}"
