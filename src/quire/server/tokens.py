"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidParameter
from quire.server.context import Server, off_loop
from quire.server.http.failures import JSON


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text to be cut into tokens."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens to be put together."""

    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    model: str | None = None


class DetokenizeReply(msgspec.Struct):
    """The text of tokens."""

    prompt: str


async def tokenize(server: Server, request: Request) -> Response:
    """The ids of a text, and if asked for their own texts."""
    body = await server.read(request, TokenizeRequest)
    server.check_model(body.model)
    tokenizer = server.need_tokenizer()
    special = body.add_special_tokens is not False
    encode = partial(tokenizer.encode, body.prompt, add_special_tokens=special)
    ids = await off_loop(len(body.prompt), encode)
    return _reply(
        TokenizeReply(
            len(ids),
            server.limits.max_model_len,
            ids,
            tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        )
    )


async def detokenize(server: Server, request: Request) -> Response:
    """The text of ids."""
    body = await server.read(request, DetokenizeRequest)
    server.check_model(body.model)
    tokenizer = server.need_tokenizer()
    unknown = [token for token in body.tokens if token >= tokenizer.vocab_size]
    if unknown:
        allowed = f"ids lie between 0 and {tokenizer.vocab_size - 1}"
        raise InvalidParameter("tokens", unknown[0], allowed)
    text = await off_loop(len(body.tokens), tokenizer.decode, body.tokens)
    return _reply(DetokenizeReply(text))


def _reply(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
