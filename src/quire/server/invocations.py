"""One path for all kinds of requests, as hosts of models call it (Amazon SageMaker's
`/invocations`): the fields of a body say which route it is for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.abilities import Ability
from quire.server.context import Server
from quire.server.http.failures import Refusal
from quire.server.openai.chat import chat_completions
from quire.server.openai.completions import completions
from quire.server.pooling.classification import classify
from quire.server.pooling.embeddings import embeddings, pooling
from quire.server.pooling.scores import rerank, score

Handler = Callable[[Server, Request], Awaitable[Response]]

_KINDS: tuple[tuple[str, Ability, Handler], ...] = (
    ("messages", "generate", chat_completions),
    ("messages", "embed", embeddings),
    ("messages", "classify", classify),
    ("messages", "pool", pooling),
    ("prompt", "generate", completions),
    ("query", "score", rerank),
    ("text_1", "score", score),
    ("queries", "score", score),
    ("data_1", "score", score),
    ("input", "embed", embeddings),
    ("input", "classify", classify),
    ("input", "pool", pooling),
)
"""A field that a kind of request must have, what the model must be able to do, and the route."""
_FIELDS = ", ".join(f"`{field}`" for field in dict.fromkeys(field for field, *_ in _KINDS))


async def invocations(server: Server, request: Request) -> Response:
    """The reply of the route that a body is for. Raises Refusal (400) for one of no kind, and what
    that route raises.
    """
    data = await server.read_bytes(request)
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"The body is not a JSON object: {error}.") from None
    handler = _handler(server, fields)
    server.body_budget.release(request.scope["state"])  # the route counts the body again
    return await handler(server, Request(request.scope, _once_more(data, request), request._send))


def _handler(server: Server, fields: Mapping[str, Any]) -> Handler:
    found = [(needs, handler) for field, needs, handler in _KINDS if field in fields]
    if not found:
        raise Refusal(400, f"A body has one of the fields {_FIELDS}, which say what it is.")
    # several kinds have the same field; what the model can do decides between them
    for needs, handler in found:
        if server.abilities.have(needs):
            return handler
    raise server.abilities.refusal_of(found[0][0])


def _once_more(data: bytes, request: Request) -> Callable[[], Awaitable[Any]]:
    """A function that receives a body again that was read."""
    is_given = False

    async def receive() -> Any:
        nonlocal is_given
        if is_given:
            return await request.receive()
        is_given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return receive
