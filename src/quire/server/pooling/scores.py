"""`POST /score` and `POST /rerank`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.engine.frontend.score_prompts import Content, ScoredText
from quire.server.context import RequestName, Server
from quire.server.openai.prompts import size_of
from quire.server.openai.replies import Usage
from quire.server.pooling.inputs import InputReader, check_no_template, cross_prompts, texts_apart
from quire.server.pooling.replies import ItemWriter, json_frame, sent
from quire.server.pooling.requests import PairFields, RerankRequest, ScoreRequest
from quire.server.pooling.runs import Pooled, collected, in_time, pooled
from quire.text.templates.template_bounds import MAX_CHARACTERS

_OF_ITEM = 8
"""Cost of an item, in numbers."""
_CHARS_OF_NUMBER = 16


class Scored(NamedTuple):
    """The score of a pair, and how many tokens both of its texts have."""

    score: float
    num_tokens: int


class ScoreItem(msgspec.Struct):
    """The score of one pair."""

    index: int
    object: str
    score: float


class ScoreReply(msgspec.Struct, kw_only=True):
    """The scores of all pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage


class RerankedDocument(msgspec.Struct):
    """A document as it was sent."""

    text: str | None
    multi_modal: list[Any] | None = None

    @classmethod
    def of(cls, given: ScoredText) -> Self:
        """A text, or its parts where it has pictures."""
        return cls(None, given.parts) if isinstance(given, Content) else cls(given)


class RerankItem(msgspec.Struct, omit_defaults=True):
    """A document's place in the request and its score."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class RerankUsage(msgspec.Struct):
    """Tokens of queries and documents."""

    prompt_tokens: int
    total_tokens: int


class RerankReply(msgspec.Struct):
    """Documents, the best one first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankItem]


async def score(server: Server, request: Request) -> Response:
    """Score each text of one list with the text of another, or with that in its place."""
    body = await server.read_for_model(request, ScoreRequest)
    first, second = body.sides()
    name = RequestName.of(request, "score-", body.request_id)
    pairs = await _scores(server, request, body, name, first, second)
    num_tokens = sum(pair.num_tokens for pair in pairs)
    reply = ScoreReply(
        id=name.shown,
        created=name.created,
        model=server.name_of(body.model),
        data=[],
        usage=Usage(num_tokens, num_tokens, 0),
    )

    def item(index: int, pair: Scored) -> bytes:
        return to_json(ScoreItem(index, "score", pair.score))

    writer = ItemWriter(pairs, [_OF_ITEM] * len(pairs), item)
    return await sent(server, writer, json_frame(reply))


async def rerank(server: Server, request: Request) -> Response:
    """Put documents in the order of how well they answer a query."""
    body = await server.read_for_model(request, RerankRequest)
    first, documents = body.sides()
    name = RequestName.of(request, "rerank-", body.request_id)
    pairs = await _scores(server, request, body, name, first, documents)
    num_tokens = sum(pair.num_tokens for pair in pairs)
    order = sorted(range(len(pairs)), key=lambda index: -pairs[index].score)[: body.top_n or None]
    shows = body.return_documents is not False

    def item(_: int, index: int) -> bytes:
        document = RerankedDocument.of(documents[index]) if shows else None
        return to_json(RerankItem(index, pairs[index].score, document))

    usage = RerankUsage(num_tokens, num_tokens)
    sizes = [_OF_ITEM + _num_chars(documents[index]) // _CHARS_OF_NUMBER for index in order]
    reply = RerankReply(name.shown, server.name_of(body.model), usage, [])
    return await sent(server, ItemWriter(order, sizes, item), json_frame(reply, "results"))


def _num_chars(document: ScoredText) -> int:
    if isinstance(document, Content):
        return size_of(document.parts, most=MAX_CHARACTERS)
    return len(document)


async def _scores(
    server: Server,
    request: Request,
    body: PairFields,
    name: RequestName,
    first: Sequence[ScoredText],
    second: Sequence[ScoredText],
) -> list[Scored]:
    """The score of each pair. `first` has one text for all, or one each."""
    body.check_lengths(server.limits.max_model_len)
    task = server.abilities.task
    if task == "classify":
        results = pooled(
            server, request, body, name, cross_prompts(server, request, body, first, second)
        )
        return await in_time(request, body, _of_pairs(results))
    check_no_template(body)
    return await in_time(request, body, _compared(server, request, body, name, first, second))


async def _of_pairs(results: AsyncGenerator[Pooled]) -> list[Scored]:
    """The scores of pairs that the model has read together."""
    async with aclosing(results):
        return [Scored(float(each.numbers[0]), each.num_tokens) async for each in results]


async def _compared(
    server: Server,
    request: Request,
    body: PairFields,
    name: RequestName,
    first: Sequence[ScoredText],
    second: Sequence[ScoredText],
) -> list[Scored]:
    """Scores of texts pooled apart: the engine compares them, so that vectors stay there."""
    reader, of_task = InputReader.of(server, request, body), body.params(server.abilities.task)
    # pairs go group by group, so that the vectors of few queries are here at a time
    group = server.pooling.window if len(first) > 1 else len(second)
    scored: list[Scored] = []
    for start in range(0, len(second), group):
        queries, documents = first[start : start + group] or first, second[start : start + group]
        places = range(start, len(second))
        own_places = places if len(first) > 1 else range(1)
        prompts = texts_apart(reader, body, queries, [of_task], 0, own_places)
        asked = await collected(pooled(server, request, body, name.another(), prompts))
        params = [of_task.comparing(query.numbers) for query in asked]
        prompts = texts_apart(reader, body, documents, params, 1, places)
        found = await collected(pooled(server, request, body, name.another(), prompts))
        # one query stands for all documents
        asked *= len(found) // len(asked)
        scored += [
            Scored(float(document.numbers[0]), query.num_tokens + document.num_tokens)
            for query, document in zip(asked, found, strict=True)
        ]
    return scored
