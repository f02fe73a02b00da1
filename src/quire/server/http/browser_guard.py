"""Bars other people's web pages from a server on a loopback address that has no API key.

A page reaches such a server from its user's browser, either as the foreign page that it is, or by
DNS rebinding: its own name is made to resolve to 127.0.0.1, and the browser takes the server for
the page's own (Jackson et al. 2007, "Protecting Browsers from DNS Rebinding Attacks").
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.failures import Refusal, error_response

_PRIVATE = (".localhost", ".local", ".internal")
"""Ends of names that no public name server answers for."""
_SAFE = ("GET", "HEAD", "OPTIONS")


class BrowserGuard:
    """Refuses (403) requests whose Host header is a public name that is not one of `hosts`, and
    requests that change something from pages of another origin than the server's and `origins`.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        app = error_response(refusal) if refusal else self._app
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_own(host):
            name = host[:100]
            text = f"The host `{name}` is not known as this server's: start it with --allowed-hosts"
            return Refusal(403, f"{text} {name}, or with an API key.")
        origin = headers.get("origin", "")
        # programs send no origin, and pages may not read what they get by GET without permission
        if scope["method"] in _SAFE or not origin.startswith(("http://", "https://")):
            return None
        if origin.partition("://")[2] == host or not self._origins.isdisjoint(("*", origin)):
            return None
        text = f"Pages of {origin[:100]} may not use this server: start it with --allowed-origins"
        return Refusal(403, f"{text} {origin[:100]}.")

    def _is_own(self, host: str) -> bool:
        """Whether no foreign page can have this host, or it was named."""
        try:
            # a dot at the end makes a name absolute, and is the same host
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if "." not in name and ":" not in name:
            return True  # a name of this network, such as localhost
        return (
            # an address was not resolved, so no foreign name server can have changed it
            name.endswith(_PRIVATE) or not self._hosts.isdisjoint(("*", name)) or _is_address(name)
        )


def is_loopback(host: str | None) -> bool:
    """Whether a server that listens at this host is reached from its own machine alone."""
    return host in (None, "localhost") or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
