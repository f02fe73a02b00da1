"""`GET /v1/models`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import Server
from quire.server.http.json_body import json_response


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the served model; `type`, `display_name` and `created_at` are Anthropic's."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    owned_by: str = "quire"
    parent: str | None = None
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    """The list of all names; `first_id`, `last_id` and `has_more` are Anthropic's."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    first_id: str
    last_id: str
    has_more: bool = False


async def models(server: Server, request: Request) -> Response:
    """List the model's names, the reported one first."""
    cards = ModelList(
        data=[_card(server, name) for name in server.names],
        first_id=server.names[0],
        last_id=server.names[-1],
    )
    return json_response(cards)


async def model(server: Server, request: Request) -> Response:
    """Return one of the names."""
    name = request.path_params["name"]
    server.check_name(name)
    return json_response(_card(server, name))


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=server.created,
        root=server.root,
        max_model_len=server.limits.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(server.created, UTC).isoformat(),
    )
