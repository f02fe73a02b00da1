"""The table of routes: what a server answers, with what bodies. The documents are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from quire.server import admin, documents, health, tokens
from quire.server.anthropic import routes as messages
from quire.server.anthropic.replies import Count, MessageReply
from quire.server.anthropic.requests import CountRequest, MessagesRequest
from quire.server.context import Server
from quire.server.openai import chat, completions, models, rendering, replies, requests
from quire.server.page import page
from quire.server.responses import routes as responses
from quire.server.responses.input_items import InputItems
from quire.server.responses.replies import ResponseObject
from quire.server.responses.requests import ResponsesRequest

Handler: TypeAlias = Callable[[Server, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One path: its methods, who answers, and the types of its bodies (None: none)."""

    methods: str
    path: str
    handler: Handler
    takes: type | None = None
    gives: type | None = None


HEALTH_ROUTES: tuple[Entry, ...] = (
    Entry("GET", "/health", health.health),
    Entry("GET POST", "/ping", health.health),
    Entry("GET", "/ready", health.ready),
    Entry("GET", "/version", health.version),
    Entry("GET", "/load", health.load),
    Entry("GET", "/metrics", health.metrics),
    Entry("GET", "/server_info", health.server_info),
    Entry("GET", "/openapi.json", documents.openapi),
    Entry("GET", "/docs", documents.docs),
)

UNSERVED = (
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/audio/transcriptions"),
    *("/v1/audio/translations", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Documented paths that other releases or other models serve: known, and refused as such."""

ROUTES: tuple[Entry, ...] = (
    Entry("GET", "/", page),
    *HEALTH_ROUTES,
    *(Entry("POST", path, health.unserved) for path in UNSERVED),
    Entry("GET", "/v1/models", models.models, gives=models.ModelList),
    Entry("GET", "/v1/models/{name:path}", models.model, gives=models.ModelCard),
    Entry(
        "POST",
        "/v1/completions",
        completions.completions,
        requests.CompletionRequest,
        replies.CompletionReply,
    ),
    Entry(
        "POST",
        "/v1/chat/completions",
        chat.chat_completions,
        requests.ChatRequest,
        replies.ChatReply,
    ),
    Entry(
        "POST",
        "/v1/completions/render",
        rendering.render_completions,
        requests.CompletionRequest,
        list[rendering.Rendered],
    ),
    Entry(
        "POST",
        "/v1/chat/completions/render",
        rendering.render_chat_completions,
        requests.ChatRequest,
        rendering.Rendered,
    ),
    Entry(
        "POST",
        "/v1/responses",
        responses.create,
        ResponsesRequest,
        ResponseObject,
    ),
    Entry("GET", "/v1/responses/{id}", responses.retrieve, gives=ResponseObject),
    Entry("DELETE", "/v1/responses/{id}", responses.delete, gives=responses.Deleted),
    Entry("GET", "/v1/responses/{id}/input_items", responses.input_items, gives=InputItems),
    Entry("POST", "/v1/responses/{id}/cancel", responses.cancel, gives=ResponseObject),
    Entry("POST", "/v1/messages", messages.messages, MessagesRequest, MessageReply),
    Entry("POST", "/v1/messages/count_tokens", messages.count_tokens, CountRequest, Count),
    Entry("POST", "/tokenize", tokens.tokenize, tokens.TokenizeRequest, tokens.TokenizeReply),
    Entry(
        "POST", "/detokenize", tokens.detokenize, tokens.DetokenizeRequest, tokens.DetokenizeReply
    ),
)

ADMIN_ROUTES: tuple[Entry, ...] = (
    Entry("POST", "/sleep", admin.sleep),
    Entry("POST", "/wake_up", admin.wake_up),
    Entry("GET", "/is_sleeping", admin.is_sleeping),
    Entry("POST", "/pause", admin.pause),
    Entry("POST", "/resume", admin.resume),
    Entry("GET", "/is_paused", admin.is_paused),
    Entry("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    Entry("POST", "/reset_mm_cache", admin.reset_mm_cache),
    Entry("POST", "/reset_encoder_cache", admin.reset_encoder_cache),
    Entry("POST", "/release_kv_cache_memory", admin.release_kv_cache_memory),
    Entry("POST", "/collective_rpc", admin.collective_rpc, admin.RpcRequest),
    Entry("POST", "/abort_requests", admin.abort_requests, admin.AbortRequest),
    Entry("POST", "/scale_elastic_ep", admin.scale_elastic_ep, admin.ScaleRequest),
    Entry("POST", "/start_profile", admin.start_profile, admin.ProfileRequest),
    Entry("POST", "/stop_profile", admin.stop_profile),
)
