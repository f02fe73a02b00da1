"""`/v1/completions/render`, `/v1/chat/completions/render`: text, ids, parameters of a request."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.params import SamplingParams
from quire.server.context import Prompt, RequestName, Server
from quire.server.http.json_body import json_response
from quire.server.openai.chat import chat_prompt
from quire.server.openai.completions import completion_prompts
from quire.server.openai.requests import ChatRequest, CompletionRequest, GenerationFields


class Rendered(msgspec.Struct, kw_only=True):
    """One prompt as the engine would get it."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None = None
    priority: int = 0


RenderedPrompts = list[Rendered]


async def render_completions(server: Server, request: Request) -> Response:
    """The prompts of a completion request, as a list."""
    body = await server.read_for_model(request, CompletionRequest)
    prompts = await completion_prompts(server, body)
    name = RequestName.of(request, "cmpl-", body.request_id)
    return json_response([_rendered(server, body, name, prompt) for prompt in prompts])


async def render_chat_completions(server: Server, request: Request) -> Response:
    """The prompt of a conversation."""
    body = await server.read_for_model(request, ChatRequest, has_one_prompt=True)
    prompt = await chat_prompt(server, request, body)
    name = RequestName.of(request, "chatcmpl-", body.request_id)
    return json_response(_rendered(server, body, name, prompt))


def _rendered(
    server: Server, body: GenerationFields, name: RequestName, prompt: Prompt
) -> Rendered:
    return Rendered(
        request_id=name.shown,
        prompt=prompt.text,
        token_ids=prompt.ids,
        sampling_params=_shown(prompt.params),
        model=server.name_of(body.model),
        stream=bool(body.stream),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
    )


def _shown(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(params)
    # the tag of the message and how the outputs are delivered, which the server decides
    hidden = ("type", "output_kind")
    return {
        name: value
        for name, value in fields.items()
        if not name.startswith("_") and name not in hidden
    }
