"""The ASGI app: the routes and the middleware around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.server.anthropic.failures import error_response as anthropic_error
from quire.server.context import RouteEntry, Server
from quire.server.http.browser_guard import BrowserGuard
from quire.server.http.failures import Refusal, error_response
from quire.server.http.in_flight import InFlightMiddleware, WithoutRoot, WithoutSlash
from quire.server.http.security import KeyGuard


@dataclass(frozen=True, slots=True)
class Access:
    """Access to the server, and its log. `origins`: web pages that may use it. `hosts`: public
    names of the server, which are checked unless None.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    shows_request_ids: bool = True
    logs: bool = False


def build_app(
    server: Server,
    access: Access,
    entries: Sequence[RouteEntry],
    extend: Callable[[Starlette], object] = lambda inner: None,
) -> ASGIApp:
    """The app that answers `entries`, and what `extend` adds. A request loses the root of its path,
    passes the request log, which also answers failures, then the guard against foreign web pages if
    there are hosts, CORS if there are origins, and the key guard if there are keys.
    """
    inner = Starlette(
        routes=[_route(server, entry.served_by(server)) for entry in entries],
        exception_handlers={HTTPException: _refuse},
    )
    # WithoutSlash serves both forms of a path
    inner.router.redirect_slashes = False
    inner.state.entries = [entry for entry in entries if entry.is_for(server)]
    extend(inner)
    app: ASGIApp = WithoutSlash(inner)
    if access.keys:  # which opens the paths that it knows, and none of another spelling
        app = KeyGuard(app, access.keys)
    if access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.origins,
            allow_methods=access.methods,
            allow_headers=access.headers,
            allow_credentials=access.allow_credentials,
            # scripts of a page see a few standard headers and these (Fetch standard, "CORS
            # protocol")
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if access.hosts is not None:
        app = BrowserGuard(app, access.hosts, access.origins)
    app = InFlightMiddleware(
        app, server.in_flight, shows_ids=access.shows_request_ids, logs=access.logs
    )
    return WithoutRoot(app, access.root_path) if access.root_path.strip("/") else app


def _route(server: Server, entry: RouteEntry) -> Route:
    return Route(entry.path, partial(entry.answer, server), methods=entry.methods.split())


async def _refuse(request: Request, error: Exception) -> Response:
    """The reply to an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    text = {
        404: "There is no such route here; GET /openapi.json lists them.",
        405: f"{request.method} is not a method of this route.",
    }.get(error.status_code, "The request was refused.")
    refusal = Refusal(error.status_code, text, headers=error.headers)
    # no route has matched, so the form of the error follows from the path
    is_anthropic = request.url.path.startswith(("/v1/messages", "/messages"))
    return anthropic_error(refusal) if is_anthropic else error_response(refusal)
