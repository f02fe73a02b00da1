"""The table of routes: paths, handlers and the types of bodies. `/openapi.json` is made from it and
from the table of the routes that control the engine (admin.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.server import health
from quire.server.abilities import Ability
from quire.server.anthropic.failures import error_response
from quire.server.context import RouteEntry
from quire.server.openai import models
from quire.server.openai.chat import chat_completions
from quire.server.openai.completions import completions
from quire.server.openai.replies import ChatReply, CompletionReply
from quire.server.openai.requests import ChatRequest, CompletionRequest
from quire.server.page import page

# folders whose modules the first request to one of their routes imports
_OPENAI, _RESPONSES = "quire.server.openai", "quire.server.responses"
_POOLING, _ANTHROPIC = "quire.server.pooling", "quire.server.anthropic"
_PAGE, _DOCUMENTS = "quire.server.page.routes", "quire.server.http.documents"
_TOKENS, _TOKENS_OUT = "quire.server.tokens", "quire.server.tokens_out"

HEALTH_ROUTES: tuple[RouteEntry, ...] = (
    RouteEntry("GET", "/health", health.health),
    RouteEntry("GET POST", "/ping", health.health),
    RouteEntry("GET", "/ready", health.ready),
    RouteEntry("GET", "/version", health.version),
    RouteEntry("GET", "/load", health.load),
    RouteEntry("GET", "/metrics", health.metrics),
    RouteEntry("GET", "/server_info", health.server_info),
    RouteEntry("GET", "/openapi.json", f"{_DOCUMENTS}:openapi"),
    RouteEntry("GET", "/docs", f"{_DOCUMENTS}:docs"),
)

UNSERVED = (*("/v1/audio/transcriptions", "/v1/audio/translations"),)
"""Paths of this field's servers that need another kind of model: answered with 501."""

_PAGE_ROUTES = (
    RouteEntry("GET", "/page/facts", f"{_PAGE}:facts", gives=f"{_PAGE}:PageFacts"),
    RouteEntry("POST", "/page/drawing", f"{_PAGE}:drawing", f"{_PAGE}:DrawRequest",
               "quire.text.markup:Drawing"),
    RouteEntry("GET", "/page/history", f"{_PAGE}:history",
               gives="quire.observability.history:Course", query=f"{_PAGE}:CourseQuery"),
)  # fmt: skip


def _pooling(path: str, handler: str, takes: str, gives: str, needs: Ability) -> RouteEntry:
    room = _POOLING
    return RouteEntry(
        "POST", path, f"{room}.{handler}", f"{room}.{takes}", f"{room}.{gives}", needs=needs
    )


def _another(path: str, entry: RouteEntry) -> RouteEntry:
    return replace(entry, path=path, takes=None, gives=None, is_alias=True)


_EMBEDDINGS = (
    _pooling("/v1/embeddings", "embeddings:embeddings", "requests:EmbeddingRequest",
             "replies:PoolingReply", "embed"),
    _pooling("/v2/embed", "cohere:embed", "cohere:CohereRequest", "cohere:CohereReply", "embed"),
    _pooling("/pooling", "embeddings:pooling", "requests:PoolingRequest", "replies:PoolingReply",
             "pool"),
    _pooling("/classify", "classification:classify", "requests:ClassificationRequest",
             "replies:PoolingReply", "classify"),
)  # fmt: skip
_SCORE = _pooling("/score", "scores:score", "requests:ScoreRequest", "scores:ScoreReply", "score")
_RERANK = _pooling(
    "/rerank", "scores:rerank", "requests:RerankRequest", "scores:RerankReply", "score"
)
_SCORES = (
    *(_SCORE, _another("/v1/score", _SCORE)),
    *(_RERANK, _another("/v1/rerank", _RERANK), _another("/v2/rerank", _RERANK)),
)


def _named(
    folder: str,
    methods: str,
    path: str,
    handler: str,
    takes: str | None = None,
    gives: str | None = None,
) -> RouteEntry:
    takes, gives = (None if name is None else f"{folder}.{name}" for name in (takes, gives))
    return RouteEntry(methods, f"/v1/{path}", f"{folder}.{handler}", takes, gives)


def _messages(
    methods: str, path: str, handler: str, takes: str | None = None, gives: str | None = None
) -> RouteEntry:
    entry = _named(_ANTHROPIC, methods, f"messages{path}", handler, takes, gives)
    return replace(entry, failure=error_response)


_MESSAGES = (
    _messages("POST", "", "routes:messages", "requests:MessagesRequest", "replies:MessageReply"),
    _messages("POST", "/batches", "batches:create", "batches:CreateBatch",
              "message_batch:BatchObject"),
    _messages("GET", "/batches", "batches:list_batches", gives="batches:BatchList"),
    _messages("GET", "/batches/{id}", "batches:retrieve", gives="message_batch:BatchObject"),
    _messages("GET", "/batches/{id}/results", "batches:results"),
    _messages("POST", "/batches/{id}/cancel", "batches:cancel", gives="message_batch:BatchObject"),
    _messages("DELETE", "/batches/{id}", "batches:delete", gives="batches:BatchDeleted"),
    _messages("POST", "/count_tokens", "routes:count_tokens", "requests:CountRequest",
              "replies:Count"),
)  # fmt: skip
"""Anthropic's API, whose clients expect errors of their own form."""


_stored = partial(_named, _RESPONSES)

_STORED = (
    _stored("POST", "responses", "routes:create", "requests:ResponsesRequest",
            "replies:ResponseObject"),
    _stored("POST", "responses/input_tokens", "routes:input_tokens", "requests:ResponsesRequest",
            "replies:InputTokens"),
    _stored("POST", "responses/compact", "routes:compact", "requests:ResponsesRequest",
            "replies:CompactedResponse"),
    _stored("GET", "responses/{id}", "routes:retrieve", gives="replies:ResponseObject"),
    _stored("DELETE", "responses/{id}", "routes:delete", gives="routes:Deleted"),
    _stored("GET", "responses/{id}/input_items", "routes:input_items",
            gives="input_items:InputItems"),
    _stored("POST", "responses/{id}/cancel", "routes:cancel", gives="replies:ResponseObject"),
    _stored("POST", "conversations", "conversations:create", "conversations:CreateConversation",
            "conversations:ConversationObject"),
    _stored("GET", "conversations/{id}", "conversations:retrieve",
            gives="conversations:ConversationObject"),
    _stored("POST", "conversations/{id}", "conversations:update",
            "conversations:UpdateConversation", "conversations:ConversationObject"),
    _stored("DELETE", "conversations/{id}", "conversations:delete",
            gives="conversations:ConversationDeleted"),
    _stored("GET", "conversations/{id}/items", "conversations:list_items",
            gives="input_items:InputItems"),
    _stored("POST", "conversations/{id}/items", "conversations:create_items",
            "conversations:CreateItems", "input_items:InputItems"),
    _stored("GET", "conversations/{id}/items/{item_id}", "conversations:retrieve_item"),
    _stored("DELETE", "conversations/{id}/items/{item_id}", "conversations:delete_item",
            gives="conversations:ConversationObject"),
)  # fmt: skip
"""Responses and conversations, which the server keeps."""

_GENERATION: tuple[RouteEntry, ...] = (
    RouteEntry("POST", "/v1/completions", completions, CompletionRequest, CompletionReply),
    RouteEntry("POST", "/v1/chat/completions", chat_completions, ChatRequest, ChatReply),
    RouteEntry(
        "POST", "/v1/completions/render", f"{_OPENAI}.rendering:render_completions",
        CompletionRequest, f"{_OPENAI}.rendering:RenderedPrompts",
    ),
    RouteEntry(
        "POST", "/v1/chat/completions/render", f"{_OPENAI}.rendering:render_chat_completions",
        ChatRequest, f"{_OPENAI}.rendering:Rendered",
    ),
    *_STORED,
    *_MESSAGES,
)  # fmt: skip

_ROUTES: tuple[RouteEntry, ...] = (
    RouteEntry("GET", "/", page),
    *_PAGE_ROUTES,
    *HEALTH_ROUTES,
    *(RouteEntry("POST", path, health.unserved) for path in UNSERVED),
    RouteEntry("POST", "/fault_tolerance/apply", health.uninstructed),
    RouteEntry("GET", "/fault_tolerance/status", health.uninstructed),
    RouteEntry("POST", "/v1/load_lora_adapter", f"{_OPENAI}.adapters:load_adapter",
               f"{_OPENAI}.adapters:LoadAdapterRequest"),
    RouteEntry("POST", "/v1/unload_lora_adapter", f"{_OPENAI}.adapters:unload_adapter",
               f"{_OPENAI}.adapters:UnloadAdapterRequest"),
    RouteEntry("GET", "/v1/models", models.models, gives=models.ModelList),
    RouteEntry("GET", "/v1/models/{name:path}", models.model, gives=models.ModelCard),
    *(replace(entry, needs="generate") for entry in _GENERATION),
    *_EMBEDDINGS,
    *_SCORES,
    RouteEntry("POST", "/invocations", "quire.server.invocations:invocations"),
    RouteEntry("POST", "/tokenize", f"{_TOKENS}:tokenize", f"{_TOKENS}:TokenizeRequest",
               f"{_TOKENS}:TokenizeReply"),
    RouteEntry("POST", "/detokenize", f"{_TOKENS}:detokenize", f"{_TOKENS}:DetokenizeRequest",
               f"{_TOKENS}:DetokenizeReply"),
)  # fmt: skip

ROUTES: tuple[RouteEntry, ...] = (
    *_ROUTES,
    *(
        replace(entry, path=entry.path.removeprefix("/v1"), is_alias=True)
        for entry in _ROUTES
        if entry.path.startswith("/v1/")
        # the engine's own /score and /rerank exist already, as routes that are documented
        and entry.path.removeprefix("/v1") not in {other.path for other in _ROUTES}
    ),
)
"""All routes; those of /v1 are also served without it, for clients whose base URL lacks it."""

TOKENIZER_INFO = RouteEntry("GET", "/tokenizer_info", f"{_TOKENS}:tokenizer_info")
"""Served with --enable-tokenizer-info-endpoint."""

TOKENS_OUT = RouteEntry(
    "POST", "/inference/v1/generate", f"{_TOKENS_OUT}:generate_tokens",
    f"{_TOKENS_OUT}:TokensRequest", f"{_TOKENS_OUT}:TokensReply", needs="generate",
)  # fmt: skip
"""Served with --enable-scale-out."""
