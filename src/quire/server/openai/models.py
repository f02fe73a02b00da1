"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import Server
from quire.server.http.failures import JSON


class ModelCard(msgspec.Struct):
    """One name that the server answers to."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "quire"
    parent: str | None = None
    permission: list[Any] = []


class ModelList(msgspec.Struct):
    """All of them."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


async def models(server: Server, request: Request) -> Response:
    """The names that the model answers to, the one that is reported first."""
    cards = ModelList([_card(server, name) for name in server.names])
    return Response(msgspec.json.encode(cards), media_type=JSON)


async def model(server: Server, request: Request) -> Response:
    """One of them."""
    name = request.path_params["name"]
    server.check_name(name)
    return Response(msgspec.json.encode(_card(server, name)), media_type=JSON)


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(name, server.created, server.root, server.limits.max_model_len)
