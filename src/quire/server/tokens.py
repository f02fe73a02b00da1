"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidParameter
from quire.server.context import Server
from quire.server.http.json_body import json_response
from quire.server.long_texts import off_loop
from quire.server.openai.chat import render_conversation
from quire.server.openai.prompts import text_ids
from quire.server.openai.requests import ChatRequest

_CHAT_FIELDS = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template"),
    "chat_template_kwargs",
)


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text or a conversation to be cut into tokens; all but `prompt` is as in a chat."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """The conversation as a chat request. Raises InvalidParameter without one."""
        if self.messages is None or self.prompt is not None:
            allowed = "either prompt or messages must be given"
            raise InvalidParameter("prompt", self.prompt, allowed)
        names = ("messages", "add_special_tokens", *_CHAT_FIELDS)
        return ChatRequest(**{name: getattr(self, name) for name in names})


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
    """The ids of a text or a conversation, and if asked for their own texts."""
    body = await server.read_for_model(request, TokenizeRequest)
    tokenizer = server.need_tokenizer()
    ids = await _ids_of(server, request, body)
    texts = None
    if body.return_token_strs:
        texts = await off_loop(len(ids), tokenizer.convert_ids_to_tokens, ids)
    return json_response(TokenizeReply(len(ids), server.limits.max_model_len, ids, texts))


async def _ids_of(server: Server, request: Request, body: TokenizeRequest) -> list[int]:
    if body.prompt is None or body.messages is not None:
        chat = body.as_chat()
        chat.check()
        # no limit: what is only counted may be longer than the model takes
        return (await render_conversation(server, request, chat, limit=None)).ids
    for name in _CHAT_FIELDS:
        if getattr(body, name) is not None:
            raise InvalidParameter(name, getattr(body, name), "it goes with messages only")
    special = body.add_special_tokens is not False
    return await text_ids(server, body.prompt, add_special_tokens=special, limit=None)


async def tokenizer_info(server: Server, request: Request) -> Response:
    """The facts that a client needs to use the tokenizer as the server does
    (--enable-tokenizer-info-endpoint serves it).
    """
    tokenizer = server.need_tokenizer()
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": server.limits.max_model_len,
            "chat_template": server.chat.template or tokenizer.chat_template,
            **tokenizer.special_tokens_map,
        }
    )


async def detokenize(server: Server, request: Request) -> Response:
    """The text of ids."""
    body = await server.read_for_model(request, DetokenizeRequest)
    tokenizer = server.need_tokenizer()
    largest = max(body.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        allowed = f"ids lie between 0 and {tokenizer.vocab_size - 1}"
        raise InvalidParameter("tokens", largest, allowed)
    text = await off_loop(len(body.tokens), tokenizer.decode, body.tokens)
    return json_response(DetokenizeReply(text))
