"""API keys: every route but four needs one.

The guard runs before the router and checks the same path. What is not listed as free is closed,
so a new route is guarded without being listed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.failures import Refusal, error_response

FREE_PATHS = frozenset({"/", "/health", "/ping", "/ready"})
KEY_SLOT = "quire.key"
"""Key in the scope's state under which the guard leaves the digest of the given API key."""


def owner_of(request: Request) -> bytes | None:
    """Digest of a request's key, which owns what the request makes; None without keys."""
    owner: bytes | None = request.scope["state"].get(KEY_SLOT)
    return owner


class KeyGuard:
    """Lets a request pass that brings one of `keys`; used only where keys are configured.

    The key is taken from `Authorization: Bearer KEY`, from `x-api-key: KEY`, or from the password
    of `Authorization: Basic`, for programs that have it from `.netrc` alone. Digests are compared,
    in constant time, with all keys each time.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # the server's own start and end, which no client sends
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = _digest(_key_of(scope))
        # a list and not a generator, which would stop at the first match and tell by its time which
        # key it was
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if any(known):
            scope.setdefault("state", {})[KEY_SLOT] = given
        elif scope["type"] != "http" or scope["path"] not in FREE_PATHS:
            await _refuse(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        # 1008: a violation of the server's policy (RFC 6455, 7.4.1)
        await send({"type": "websocket.close", "code": 1008})
        return
    text = "Give a valid API key in the header `Authorization: Bearer KEY`."
    refusal = Refusal(401, text, headers={"WWW-Authenticate": "Bearer"})
    await error_response(refusal)(scope, receive, send)


def _key_of(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
            if scheme.lower() == b"basic":
                return _password(key.strip())
        if name == b"x-api-key":
            return bytes(value)
    return b""


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
