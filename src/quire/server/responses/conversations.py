"""`/v1/conversations`: conversations that responses go on from and are added to."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import Server
from quire.server.http.failures import Refusal
from quire.server.http.json_body import json_response
from quire.server.http.security import owner_of
from quire.server.responses.input_items import InputItems, named_items, page_of
from quire.server.responses.items import conversation as messages_of
from quire.server.responses.stored_conversation import Conversation

_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
_Items = Annotated[list[dict[str, Any]], Meta(max_length=256)]


class CreateConversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/conversations`."""

    items: _Items | None = None
    metadata: _Metadata | None = None


class UpdateConversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/conversations/{id}`."""

    metadata: _Metadata


class CreateItems(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/conversations/{id}/items`."""

    items: _Items


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct):
    """The reply to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


async def create(server: Server, request: Request) -> Response:
    """Begin a conversation."""
    body = await server.read(request, CreateConversation)
    if not server.conversations.is_open:
        raise Refusal(501, "This server keeps no conversations (--max-stored-responses).")
    most = server.conversations.max_bytes
    made = Conversation(body.metadata or {}, owner_of(request), most)
    added = _named(body.items or [])
    made.check_room(added)
    made.extend(added)
    if not server.conversations.add(made):
        raise Refusal(413, "The items are too large to be kept (--max-stored-bytes).")
    return _shown(made)


async def retrieve(server: Server, request: Request) -> Response:
    """A conversation without its items."""
    return _shown(kept(server, request, request.path_params["id"]))


async def update(server: Server, request: Request) -> Response:
    """Replace the metadata of a conversation."""
    found = kept(server, request, request.path_params["id"])
    found.metadata = (await server.read(request, UpdateConversation)).metadata
    return _shown(found)


async def delete(server: Server, request: Request) -> Response:
    """Forget a conversation; responses that were made in it stay."""
    found = kept(server, request, request.path_params["id"])
    server.conversations.remove(found.id)
    return json_response(ConversationDeleted(found.id))


async def list_items(server: Server, request: Request) -> Response:
    """The items of a conversation, page by page."""
    found = kept(server, request, request.path_params["id"])
    return json_response(page_of(found.items, request.query_params))


async def create_items(server: Server, request: Request) -> Response:
    """Add items to a conversation."""
    found = kept(server, request, request.path_params["id"])
    body = await server.read(request, CreateItems)
    added = _named(body.items)
    # before any is added: a refused request changes nothing
    found.check_room(added)
    found.extend(added)
    server.conversations.renew(found.id)
    ids = [item["id"] for item in added] or [None]
    return json_response(InputItems(added, ids[0], ids[-1], has_more=False))


async def retrieve_item(server: Server, request: Request) -> Response:
    """One item of a conversation."""
    found = kept(server, request, request.path_params["id"])
    return json_response(_item(found, request.path_params["item_id"]))


async def delete_item(server: Server, request: Request) -> Response:
    """Take an item out of a conversation, which is the reply."""
    found = kept(server, request, request.path_params["id"])
    found.remove(_item(found, request.path_params["item_id"]))
    return _shown(found)


def kept(server: Server, request: Request, id: str) -> Conversation:
    """The conversation with this id. Raises Refusal (404)."""
    found = server.conversations.get(id, owner_of(request))
    if found is None:
        raise Refusal(404, f"There is no conversation `{id[:100]}` here.", param="conversation")
    server.conversations.renew(id)  # the one that was unused for longest makes room
    return found


def _item(found: Conversation, id: str) -> dict[str, Any]:
    item = found.item(id)
    if item is None:
        raise Refusal(404, f"There is no item `{id[:100]}` here.", param="item_id")
    return item


def _named(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items with ids of their own. Raises InvalidParameter for one that no response could use."""
    messages_of(items, "items")
    # ids of other responses could be in the conversation already
    own = [{name: value for name, value in item.items() if name != "id"} for item in items]
    return named_items(own, secrets.token_hex(12))


def _shown(found: Conversation) -> Response:
    return json_response(
        ConversationObject(id=found.id, created_at=found.created_at, metadata=found.metadata)
    )
