"""Routes for the page alone: the server's defaults, drawings of answers, the last hour."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.params import SamplingParams
from quire.server.context import Server
from quire.server.http.failures import JSON, Refusal
from quire.server.http.json_body import json_response, read_query
from quire.server.openai.completions import DEFAULT_MAX_TOKENS
from quire.text.markup import MAX_MARKUP_CHARS, missing_packages

_SHOWN_DEFAULTS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)


class PageFacts(msgspec.Struct, kw_only=True):
    """Defaults of requests that leave them open, and whether answers can be drawn.

    `sampling`: the parameters of sampling. `max_tokens`: the most tokens of an answer, None for
    what the context has room for; `max_tokens_of_completion` likewise where a text is continued.
    `missing_packages`: what has to be installed before answers can be drawn. `takes_pictures`:
    conversations may have some.
    """

    sampling: dict[str, Any]
    max_tokens: int | None
    max_tokens_of_completion: int
    max_model_len: int
    missing_packages: list[str]
    takes_pictures: bool


class DrawRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer's text from its first block not drawn yet; `is_whole`: it is complete."""

    text: Annotated[str, Meta(max_length=MAX_MARKUP_CHARS)]
    is_whole: bool = False


class CourseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The time after which samples are wanted (seconds of the server's clock)."""

    since: float = 0.0


async def facts(server: Server, request: Request) -> Response:
    """The defaults of this server, and what it can draw."""
    neutral = SamplingParams()
    given = server.sampling_defaults
    most = given.get("max_tokens")
    return json_response(
        PageFacts(
            sampling={name: given.get(name, getattr(neutral, name)) for name in _SHOWN_DEFAULTS},
            max_tokens=most,
            max_tokens_of_completion=min(DEFAULT_MAX_TOKENS, most or DEFAULT_MAX_TOKENS),
            max_model_len=server.limits.max_model_len,
            missing_packages=missing_packages(),
            takes_pictures=server.engine.front_end.inputs.takes_pictures,
        )
    )


async def drawing(server: Server, request: Request) -> Response:
    """The finished blocks of an answer: Markdown, code and formulas as elements of a document."""
    body = await server.read(request, DrawRequest)
    if missing := missing_packages():
        names = ", ".join(missing)
        text = f"Answers are drawn with {names}, not installed here: pip install 'quire[page]'."
        raise Refusal(501, text)
    drawn = await server.need_texts().drawing(body.text, is_whole=body.is_whole)
    return Response(drawn, media_type=JSON)


async def history(server: Server, request: Request) -> Response:
    """The course of load, speed, latencies and memory over the last hour."""
    query = read_query(request.query_params, CourseQuery)
    return json_response(server.history.since(query.since))
