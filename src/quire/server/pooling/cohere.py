"""`POST /v2/embed`, Cohere's form of embeddings."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.engine.frontend.score_prompts import Content, ScoredText
from quire.errors import InvalidParameter, RequestError
from quire.params import PoolingParams
from quire.server.context import RequestName, Server
from quire.server.pooling.inputs import InputReader, PoolingPrompt, prompts_of
from quire.server.pooling.replies import ItemWriter, sent
from quire.server.pooling.requests import InputFields, Item, PooledBody, texts_of
from quire.server.pooling.runs import Numbers, Pooled, all_pooled, check_size
from quire.server.pooling.vectors import as_bytes, sign_bits

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]

_OF_ITEM = 8
_SHIFT = 128
"""Difference between unsigned bytes and those of `binary`."""


class CohereRequest(PooledBody, kw_only=True):
    """Texts, in one of two fields, and how their vectors are written."""

    INPUT: ClassVar[str] = "texts"

    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    images: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: int | None = None
    truncate: Literal["END", "START", "NONE"] | None = None
    max_tokens: int | None = None

    @property
    def truncation(self) -> dict[str, Any]:
        if self.truncate == "NONE":
            return {}
        # END where it is left out, as Cohere has it
        side = "left" if self.truncate == "START" else "right"
        most = -1 if self.max_tokens is None else self.max_tokens
        return {"truncate_prompt_tokens": most, "truncation_side": side}

    def field_of(self, parameter: str) -> str:
        names = {
            "truncate_prompt_tokens": "max_tokens",
            "max_length": "max_tokens",
            "dimensions": "output_dimension",
        }
        return names.get(parameter) or super().field_of(parameter)

    def field_and_items(self) -> tuple[str, list[ScoredText]]:
        """The field that is embedded, and its texts or contents. Raises InvalidParameter."""
        given = {"texts": self.texts, "inputs": self.inputs, "images": self.images}
        fields = [field for field, value in given.items() if value]
        if len(fields) != 1:
            allowed = "exactly one of texts, inputs and images must be given, and not empty"
            raise InvalidParameter("texts", self.texts, allowed)
        if fields == ["images"]:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images or ()]
            return "images", [Content([part]) for part in parts]
        if fields == ["inputs"]:
            return "inputs", texts_of("inputs", [_input(one) for one in self.inputs or ()])
        return "texts", [*(self.texts or ())]


class ApiVersion(msgspec.Struct):
    """Cohere's version of this route."""

    version: str = "2"


class BilledUnits(msgspec.Struct):
    """Tokens of the texts, and those that stand for pictures."""

    input_tokens: int
    image_tokens: int = 0


class CohereMeta(msgspec.Struct):
    """Cohere's statements about a request."""

    api_version: ApiVersion
    billed_units: BilledUnits


class CohereReply(msgspec.Struct, kw_only=True):
    """`embeddings` has the vectors of all texts for each type that was asked for."""

    id: str
    embeddings: dict[str, list[Any]] = {}
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


async def embed(server: Server, request: Request) -> Response:
    """Make a vector of each text or picture."""
    body = await server.read_for_model(request, CohereRequest)
    field, given = body.field_and_items()
    before = _prompt(server, body.input_type)
    asked: Sequence[EmbeddingType] = body.embedding_types or ["float"]
    kinds = list(dict.fromkeys(asked))
    check_size(len(given) * server.abilities.facts.size(body.output_dimension))
    name = RequestName.of(request, "embd-", body.request_id)
    reader = InputReader.of(server, request, body)
    if body.truncate == "NONE" and body.max_tokens is not None:
        limit = _checked_limit(body.max_tokens, server.limits.max_model_len)
        reader = replace(reader, limit=limit, bound="max_tokens")
    params = PoolingParams(task="embed", dimensions=body.output_dimension)
    items = [_item(each, before) for each in given]
    rows: list[int] = []
    prompts = _counting(prompts_of(reader, InputFields(), items, params, field), rows)
    results = await all_pooled(server, request, body, name, prompts)
    num_tokens = sum(one.num_tokens for one in results)
    reply = CohereReply(
        id=name.shown,
        texts=[each for each in given if isinstance(each, str)],
        meta=CohereMeta(ApiVersion(), BilledUnits(num_tokens - sum(rows), sum(rows))),
    )
    return await _reply(server, reply, kinds, results)


async def _reply(
    server: Server, reply: CohereReply, kinds: Sequence[EmbeddingType], results: Sequence[Pooled]
) -> Response:
    last = len(results) - 1
    items = [(kind, place) for kind in kinds for place in range(len(results))]
    if {"binary", "ubinary"} & {*kinds}:
        sign_bits(results[0].numbers)  # which refuses what the reply's thread could not

    def item(index: int, which: tuple[EmbeddingType, int]) -> bytes:
        kind, place = which
        value = to_json(_value(kind, results[place].numbers))
        head = b'"%s":[' % kind.encode() if place == 0 else b","
        tail = b"" if place < last else (b"]" if index == len(items) - 1 else b"],")
        return head + value + tail

    sizes = [results[place].numbers.size + _OF_ITEM for _, place in items]
    # the first place with these bytes is the field: quotes in the id before it are escaped
    before, _, after = to_json(reply).partition(b'"embeddings":{}')
    frame = before + b'"embeddings":{', b"", b"}" + after
    return await sent(server, ItemWriter(items, sizes, item), frame)


def _value(kind: EmbeddingType, numbers: Numbers) -> Any:
    if kind == "float":
        return numbers.tolist()
    if kind == "base64":
        return base64.b64encode(as_bytes(numbers, "float32", "little")).decode("ascii")
    # bytes without a sign would wrap below 0
    bits = sign_bits(numbers).astype(np.int16)
    return (bits - _SHIFT if kind == "binary" else bits).tolist()


def _prompt(server: Server, input_type: str | None) -> str:
    """The prefix that the model wants before texts of this type. Raises RequestError."""
    if input_type is None:
        return ""
    prompts = server.pooling.prompts
    if input_type not in prompts:
        known = ", ".join(prompts)
        hint = f"The model's are {known}" if known else "The model has none; leave it out"
        text = f"Unsupported input_type {input_type!r}. {hint}."
        raise RequestError(text, parameter="input_type", value=input_type)
    return prompts[input_type]


def _checked_limit(max_tokens: int, longest: int) -> int:
    if not 1 <= max_tokens <= longest:
        allowed = f"it must lie between 1 and max_model_len={longest}"
        raise InvalidParameter("max_tokens", max_tokens, allowed)
    return max_tokens


def _input(given: dict[str, Any]) -> dict[str, Any]:
    if given.keys() != {"content"}:
        raise InvalidParameter("inputs", given, 'an input is {"content": [{"type": "text", ...}]}')
    return given


def _item(given: ScoredText, before: str) -> Item:
    """An input after its type's prefix, which for pictures is a message of the system."""
    if isinstance(given, str):
        return before + given
    conversation: list[dict[str, Any]] = [{"role": "user", "content": given.parts}]
    return [{"role": "system", "content": before}, *conversation] if before else conversation


async def _counting(
    prompts: AsyncGenerator[PoolingPrompt], rows: list[int]
) -> AsyncGenerator[PoolingPrompt]:
    """The prompts; `rows` gets how many tokens of each stand for pictures."""
    async with aclosing(prompts):
        async for prompt in prompts:
            items = [] if prompt.media is None else prompt.media.items
            rows.append(sum(item.num_rows for item in items))
            yield prompt
