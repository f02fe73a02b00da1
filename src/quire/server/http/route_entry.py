"""A row of the tables of routes (server/routes.py, server/admin.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import Server

Handler: TypeAlias = Callable[[Server, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One path: its methods, who answers, and the types of its bodies (None: none)."""

    methods: str
    path: str
    handler: Handler
    takes: type | None = None
    gives: type | None = None
