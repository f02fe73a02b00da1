"""`/v1/messages/batches`: many messages that are answered in the background, a number at a time."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.errors import InvalidParameter
from quire.server.anthropic.batch_store import BatchedRequest, BatchObject, MessageBatch
from quire.server.anthropic.routes import error_response
from quire.server.context import Server
from quire.server.http.failures import JSON, Refusal
from quire.server.http.security import KEY_SLOT

_MOST = 1000


class CreateBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/batches`."""

    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=100_000)]


class BatchList(msgspec.Struct):
    """A page of batches, the newest first."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchDeleted(msgspec.Struct):
    """The reply to the deletion of a batch."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


async def create(server: Server, request: Request) -> Response:
    """Begin a batch."""
    try:
        body = await server.read(request, CreateBatch)
        names = [one.custom_id for one in body.requests]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise InvalidParameter("requests.custom_id", name, "each needs one of its own")
        batch = MessageBatch(body.requests, _owner(request), _url(request))
        server.batches.add(batch)
    except ClientDisconnect:
        raise
    except Exception as error:
        return error_response(error)
    batch.start(request.app, server.in_flight)
    return _reply(batch.shown)


async def retrieve(server: Server, request: Request) -> Response:
    """A batch as it is now."""
    batch = _kept(server, request)
    return _missing(request) if batch is None else _reply(batch.shown)


async def list_batches(server: Server, request: Request) -> Response:
    """The batches of a key, page by page."""
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        return error_response(InvalidParameter("limit", limit[:80], f"it must be 1 to {_MOST}"))
    shown = [batch.shown for batch in server.batches.of(_owner(request))]
    ids = [one.id for one in shown]
    if (after := request.query_params.get("after_id")) in ids:
        shown = shown[ids.index(after) + 1 :]
    if (before := request.query_params.get("before_id")) in ids:
        shown = shown[: ids.index(before)]
    page = shown[: int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return _reply(BatchList(page, first, last, len(shown) > len(page)))


async def results(server: Server, request: Request) -> Response:
    """The results of a batch that has ended, one JSON object in a line."""
    batch = _kept(server, request)
    if batch is None:
        return _missing(request)
    if not batch.is_over:
        return error_response(Refusal(409, "This batch has not ended."))
    lines = b"".join(line + b"\n" for line in batch.results.values())
    return Response(lines, media_type="application/x-jsonl")


async def cancel(server: Server, request: Request) -> Response:
    """End a batch; what has been answered keeps its result."""
    batch = _kept(server, request)
    if batch is None:
        return _missing(request)
    batch.cancel()
    return _reply(batch.shown)


async def delete(server: Server, request: Request) -> Response:
    """Forget a batch that has ended."""
    batch = _kept(server, request)
    if batch is None:
        return _missing(request)
    if not batch.is_over:
        return error_response(Refusal(409, "This batch has not ended; cancel it first."))
    server.batches.remove(batch.shown.id)
    return _reply(BatchDeleted(batch.shown.id))


def _kept(server: Server, request: Request) -> MessageBatch | None:
    own = server.batches.of(_owner(request))
    return next((b for b in own if b.shown.id == request.path_params["id"]), None)


def _missing(request: Request) -> Response:
    return error_response(Refusal(404, f"There is no batch `{request.path_params['id'][:100]}`."))


def _owner(request: Request) -> bytes | None:
    owner: bytes | None = request.scope["state"].get(KEY_SLOT)
    return owner


def _url(request: Request) -> str:
    return str(request.url).partition("?")[0].rstrip("/")


def _reply(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
