"""`GET /v1/models`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.adapters import ServedAdapter
from quire.server.context import Server
from quire.server.http.json_body import json_response


class ModelCard(msgspec.Struct, kw_only=True):
    """A name of the model, or an adapter; `type`, `display_name`, `created_at` are Anthropic's."""

    id: str
    created: int
    root: str
    max_model_len: int | None
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
    """List the model's names, the reported one first, and then its adapters."""
    cards = [_card(server, name) for name in server.names]
    cards += [_adapter_card(server, adapter) for adapter in server.adapters.named.values()]
    return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(server: Server, request: Request) -> Response:
    """Return one of the names."""
    name = request.path_params["name"]
    if name in server.names:
        return json_response(_card(server, name))
    if name in server.adapters.named:
        return json_response(_adapter_card(server, server.adapters.named[name]))
    raise server.unknown_model(name)


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=server.created,
        root=server.root,
        max_model_len=server.limits.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(server.created, UTC).isoformat(),
    )


def _adapter_card(server: Server, adapter: ServedAdapter) -> ModelCard:
    """The card of an adapter, which names the model that it changes as its parent."""
    asked = adapter.request
    parent = asked.base_model_name if asked.base_model_name in server.names else server.names[0]
    return ModelCard(
        id=asked.lora_name,
        created=adapter.created,
        root=asked.lora_path,
        parent=parent,
        max_model_len=None,
        display_name=asked.lora_name,
        created_at=datetime.fromtimestamp(adapter.created, UTC).isoformat(),
    )
