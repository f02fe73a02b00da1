"""An HTTP client for strangers' URLs: a name is resolved once, its addresses are checked, and one
of them is dialled, with the name kept for TLS and the header Host. Every redirect begins anew.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import cached_property
from urllib.parse import urlsplit

import h11

from quire.media.fetch.addresses import is_public
from quire.media.fetch.settings import ByteBudget, FetchFault, FetchSettings
from quire.media.fetch.urls import WebAddress, redirected, shown_host
from quire.release import __version__

Resolve = Callable[[str, int], Awaitable[list[str]]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WORTH_ANOTHER_TRY = frozenset({408, 429})
_READ_BYTES = 2**16
_MOST_ADDRESSES = 4
_MOST_HEADER_BYTES = 2**16
_PAUSE_S = 1.0
_GROWTH = 4


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, without repeats."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class WebClient:
    """Gets bodies of http(s) URLs. `resolver`, `connect`, `sleep` and TLS `context`: for tests."""

    def __init__(
        self,
        settings: FetchSettings,
        *,
        resolver: Resolve = resolve,
        connect: Callable[..., Awaitable[Streams]] = asyncio.open_connection,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._resolve, self._connect, self._sleep = resolver, connect, sleep
        self._given_context = context

    def check(self, address: WebAddress) -> None:
        """Raise FetchFault for a host whose name or address is not allowed, without asking."""
        allowed = {domain.lower().rstrip(".") for domain in self._settings.allowed_domains}
        if allowed and address.host not in allowed:
            raise FetchFault(
                f"comes from {shown_host(address.host)}, and only these hosts are allowed: "
                f"{', '.join(sorted(allowed))}"
            )
        if _is_address(address.host) and not self._is_allowed(address.host):
            raise _private(address)

    async def get(self, address: WebAddress, budget: ByteBudget) -> bytes:
        """The body. Raises FetchFault."""
        settings = self._settings
        pause, timeout = _PAUSE_S, settings.timeout_s
        try:
            async with asyncio.timeout(settings.total_s):
                for number in range(settings.num_tries):
                    try:
                        async with asyncio.timeout(timeout):
                            return await self._followed(address, budget)
                    except TimeoutError:
                        fault = _failed(address, "it takes too long")
                    except FetchFault as error:
                        # a refusal stays one, and asking again would be a burden to a stranger
                        if not error.may_pass:
                            raise
                        fault = error
                    if number + 1 < settings.num_tries:
                        await self._sleep(pause)
                    pause, timeout = pause * _GROWTH, timeout * _GROWTH
        except TimeoutError:
            fault = _failed(address, "it takes too long")
        raise fault

    async def _followed(self, address: WebAddress, budget: ByteBudget) -> bytes:
        for _ in range(self._settings.max_redirects + 1):
            self.check(address)
            try:
                body = await self._exchange(address, budget)
            except ssl.SSLError:
                raise FetchFault(_words(address, "its certificate or its TLS fails")) from None
            except (OSError, EOFError, h11.ProtocolError):
                raise _failed(address, "the connection fails") from None
            if isinstance(body, bytes):
                return body
            if not self._settings.allows_redirects:
                raise FetchFault("is redirected, which is not allowed here")
            address = body
        raise FetchFault(f"is redirected more than {self._settings.max_redirects} times")

    async def _exchange(self, address: WebAddress, budget: ByteBudget) -> bytes | WebAddress:
        """One request on one connection: the body, or where it is."""
        proxy = self._settings.proxies.get(address.scheme)
        opened = self._through(proxy, address) if proxy else self._direct(address)
        reader, writer = await opened
        try:
            client = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEADER_BYTES)
            is_plain_proxy = bool(proxy) and address.scheme == "http"
            headers = [
                ("Host", address.authority),
                ("User-Agent", f"quire/{__version__}"),
                ("Accept", "*/*"),
                # a compressed body could unpack to any size
                ("Accept-Encoding", "identity"),
                ("Connection", "close"),
            ]
            target = address.text if is_plain_proxy else address.target
            request = h11.Request(method="GET", target=target, headers=headers)
            writer.write((client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b""))
            await writer.drain()
            read = _Counted(budget)
            try:
                return await self._reply(client, reader, address, read)
            except BaseException:
                read.give_back()
                raise
        finally:
            # not `close`, which waits for what is not sent yet
            writer.transport.abort()

    async def _reply(
        self,
        client: h11.Connection,
        reader: asyncio.StreamReader,
        address: WebAddress,
        budget: _Counted,
    ) -> bytes | WebAddress:
        most = self._settings.max_bytes
        parts: list[bytes] = []
        size = 0
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                client.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                fields = {name.decode("latin-1"): value for name, value in event.headers}
                if event.status_code in _REDIRECTS and b"location" in dict(event.headers):
                    return redirected(address, fields["location"].decode("latin-1"))
                _check_status(address, event.status_code)
                if fields.get("content-encoding", b"identity").lower() != b"identity":
                    raise FetchFault(_words(address, "it is compressed, which was not asked for"))
                length = fields.get("content-length", b"0")
                # before the body, which a stranger may send slowly
                if int(length) > most:
                    raise FetchFault(f"has more than {most} bytes")
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > most:
                    raise FetchFault(f"has more than {most} bytes")
                budget.take(len(event.data))
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(parts)
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError

    async def _direct(self, address: WebAddress) -> Streams:
        try:
            found = await self._resolve(address.host, address.port)
        except (OSError, UnicodeError):
            raise _failed(address, "its name is not known") from None
        if not found:
            raise _failed(address, "its name is not known")
        # All of them: a name that has one of each would else be tried until the right one is first.
        if not all(map(self._is_allowed, found)):
            raise _private(address)
        is_secure = address.scheme == "https"
        last: OSError | None = None
        # a name may have any number of addresses, each of which costs a timeout
        for place in found[:_MOST_ADDRESSES]:
            try:
                return await self._connect(
                    place,
                    address.port,
                    ssl=self._context if is_secure else None,
                    # the certificate is that of the name, though an address is dialled
                    server_hostname=address.host if is_secure else None,
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                last = error
        raise last or OSError()

    async def _through(self, proxy: str, address: WebAddress) -> Streams:
        """Fetch by a proxy, which the operator has set and trusts to resolve names."""
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        reader, writer = await self._connect(parts.hostname, parts.port or 80)
        if address.scheme == "http":
            return reader, writer
        host = f"[{address.host}]" if ":" in address.host else address.host
        line = f"CONNECT {host}:{address.port} HTTP/1.1\r\nHost: {host}:{address.port}\r\n\r\n"
        writer.write(line.encode())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise OSError("the head of the proxy's reply is too long") from None
        if head.split(b" ", 2)[1:2] != [b"200"]:
            raise OSError("the proxy refuses")
        await writer.start_tls(self._context, server_hostname=address.host)
        return reader, writer

    def _is_allowed(self, place: str) -> bool:
        return self._settings.allows_private or is_public(place)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._given_context or ssl.create_default_context()


class _Counted:
    """The part of a budget that one try takes."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        self._budget.take(num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        self._budget.give_back(self._num_bytes)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_status(address: WebAddress, status: int) -> None:
    if status == 200:
        return
    text = _words(address, f"it answers {status}")
    raise FetchFault(text, may_pass=status >= 500 or status in _WORTH_ANOTHER_TRY)


def _failed(address: WebAddress, why: str) -> FetchFault:
    return FetchFault(_words(address, why), may_pass=True)


def _private(address: WebAddress) -> FetchFault:
    return FetchFault(_words(address, "its address is not one of the public internet"))


def _words(address: WebAddress, why: str) -> str:
    return f"cannot be fetched from {shown_host(address.host)}: {why}"
