"""`/v1/messages/batches`: many messages that are answered in the background, a number at a time."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidParameter
from quire.server.anthropic.message_batch import BatchedRequest, BatchObject, MessageBatch
from quire.server.context import Server
from quire.server.http.failures import Refusal
from quire.server.http.json_body import json_response
from quire.server.http.paging import page_limit
from quire.server.http.security import owner_of

_MOST = 1000


class CreateBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/batches`."""

    MOST_CONTAINERS: ClassVar[int] = 2**20  # the parameters are decoded one request at a time

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
    body = await server.read(request, CreateBatch)
    times = Counter(request.custom_id for request in body.requests)
    if repeated := [name for name, num in times.items() if num > 1]:
        raise InvalidParameter("requests.custom_id", repeated[0], "each needs one of its own")
    url = str(request.url).partition("?")[0].rstrip("/")
    batch = MessageBatch(body.requests, owner_of(request), url)
    if not server.batches.add(batch):
        text = "There is no room for this batch (--max-stored-responses, --max-stored-bytes)."
        # 429 is worth another try, as batches end; a server that keeps none says 501
        raise Refusal(429 if server.batches.is_open else 501, text)
    batch.start(request.app, server.in_flight)
    return json_response(batch.shown)


async def retrieve(server: Server, request: Request) -> Response:
    """A batch as it is now."""
    return json_response(_kept(server, request).shown)


async def list_batches(server: Server, request: Request) -> Response:
    """The batches of a key, page by page."""
    limit = page_limit(request.query_params, _MOST)
    shown = [batch.shown for batch in server.batches.of(owner_of(request))]
    ids = [one.id for one in shown]
    after = _place(request, "after_id", ids)
    before = _place(request, "before_id", ids)
    shown = shown[0 if after is None else after + 1 : before]
    # before an id comes what is next to it, not what is newest
    page = shown[:limit] if before is None else shown[max(0, len(shown) - limit) :]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(BatchList(page, first, last, len(shown) > len(page)))


async def results(server: Server, request: Request) -> Response:
    """The results of a batch that has ended, one JSON object in a line."""
    batch = _kept(server, request)
    if not batch.is_over:
        raise Refusal(409, "This batch has not ended.")
    lines = b"".join(line + b"\n" for line in batch.results.values())
    return Response(lines, media_type="application/x-jsonl")


async def cancel(server: Server, request: Request) -> Response:
    """End a batch; what has been answered keeps its result."""
    batch = _kept(server, request)
    batch.cancel()
    return json_response(batch.shown)


async def delete(server: Server, request: Request) -> Response:
    """Forget a batch that has ended."""
    batch = _kept(server, request)
    if not batch.is_over:
        raise Refusal(409, "This batch has not ended; cancel it first.")
    server.batches.remove(batch.shown.id)
    return json_response(BatchDeleted(batch.shown.id))


def _place(request: Request, name: str, ids: list[str]) -> int | None:
    """Index of the batch that the query names, if it does. Raises InvalidParameter."""
    id = request.query_params.get(name)
    if id is not None and id not in ids:
        raise InvalidParameter(name, id[:80], "it must be the id of one of the batches")
    return None if id is None else ids.index(id)


def _kept(server: Server, request: Request) -> MessageBatch:
    id = request.path_params["id"]
    batch = server.batches.get(id, owner_of(request))
    if batch is None:
        raise Refusal(404, f"There is no batch `{id[:100]}`.")
    return batch
