"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import Server
from quire.server.http.failures import JSON


class ModelCard(msgspec.Struct):
    """One name of the served model."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "quire"
    parent: str | None = None
    permission: list[Any] = []


class ModelList(msgspec.Struct):
    """The list of all names."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


async def models(server: Server, request: Request) -> Response:
    """List the model's names, the reported one first."""
    cards = ModelList([_card(server, name) for name in server.names])
    return Response(msgspec.json.encode(cards), media_type=JSON)


async def model(server: Server, request: Request) -> Response:
    """Return one of the names."""
    name = request.path_params["name"]
    server.check_name(name)
    return Response(msgspec.json.encode(_card(server, name)), media_type=JSON)


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(name, server.created, server.root, server.limits.max_model_len)
