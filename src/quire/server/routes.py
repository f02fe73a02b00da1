"""The table of routes: paths, handlers and the types of bodies. `/openapi.json` is made from it and
from the table of the routes that control the engine (admin.py).
"""

from __future__ import annotations

from dataclasses import replace

from quire.server import health, tokens
from quire.server.anthropic import batches
from quire.server.anthropic import routes as messages
from quire.server.anthropic.failures import error_response
from quire.server.anthropic.message_batch import BatchObject
from quire.server.anthropic.replies import Count, MessageReply
from quire.server.anthropic.requests import CountRequest, MessagesRequest
from quire.server.context import RouteEntry
from quire.server.http import documents
from quire.server.invocations import invocations
from quire.server.openai import adapters, models, rendering
from quire.server.openai.chat import chat_completions
from quire.server.openai.completions import completions
from quire.server.openai.replies import ChatReply, CompletionReply
from quire.server.openai.requests import ChatRequest, CompletionRequest
from quire.server.page import page
from quire.server.page.routes import PAGE_ROUTES
from quire.server.pooling.classification import classify
from quire.server.pooling.cohere import CohereReply, CohereRequest, embed
from quire.server.pooling.embeddings import embeddings, pooling
from quire.server.pooling.replies import PoolingReply
from quire.server.pooling.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.pooling.scores import RerankReply, ScoreReply, rerank, score
from quire.server.responses import conversations
from quire.server.responses import routes as responses
from quire.server.responses.input_items import InputItems
from quire.server.responses.replies import CompactedResponse, InputTokens, ResponseObject
from quire.server.responses.requests import ResponsesRequest
from quire.server.tokens_out import TokensReply, TokensRequest, generate_tokens

HEALTH_ROUTES: tuple[RouteEntry, ...] = (
    RouteEntry("GET", "/health", health.health),
    RouteEntry("GET POST", "/ping", health.health),
    RouteEntry("GET", "/ready", health.ready),
    RouteEntry("GET", "/version", health.version),
    RouteEntry("GET", "/load", health.load),
    RouteEntry("GET", "/metrics", health.metrics),
    RouteEntry("GET", "/server_info", health.server_info),
    RouteEntry("GET", "/openapi.json", documents.openapi),
    RouteEntry("GET", "/docs", documents.docs),
)

UNSERVED = (*("/v1/audio/transcriptions", "/v1/audio/translations"),)
"""Paths of this field's servers that need another kind of model: answered with 501."""

_POOLING = (
    RouteEntry("POST", "/v1/embeddings", embeddings, EmbeddingRequest, PoolingReply, needs="embed"),
    RouteEntry("POST", "/v2/embed", embed, CohereRequest, CohereReply, needs="embed"),
    RouteEntry("POST", "/pooling", pooling, PoolingRequest, PoolingReply, needs="pool"),
    RouteEntry("POST", "/classify", classify, ClassificationRequest, PoolingReply,
               needs="classify"),
    RouteEntry("POST", "/score", score, ScoreRequest, ScoreReply, needs="score"),
    RouteEntry("POST", "/v1/score", score, needs="score", is_alias=True),
    RouteEntry("POST", "/rerank", rerank, RerankRequest, RerankReply, needs="score"),
    RouteEntry("POST", "/v1/rerank", rerank, needs="score", is_alias=True),
    RouteEntry("POST", "/v2/rerank", rerank, needs="score", is_alias=True),
)  # fmt: skip

_MESSAGES = tuple(
    replace(entry, failure=error_response)
    for entry in (
        RouteEntry("POST", "/v1/messages", messages.messages, MessagesRequest, MessageReply),
        RouteEntry("POST", "/v1/messages/batches", batches.create,
                   batches.CreateBatch, BatchObject),
        RouteEntry("GET", "/v1/messages/batches", batches.list_batches, gives=batches.BatchList),
        RouteEntry("GET", "/v1/messages/batches/{id}", batches.retrieve, gives=BatchObject),
        RouteEntry("GET", "/v1/messages/batches/{id}/results", batches.results),
        RouteEntry("POST", "/v1/messages/batches/{id}/cancel", batches.cancel, gives=BatchObject),
        RouteEntry("DELETE", "/v1/messages/batches/{id}", batches.delete,
                   gives=batches.BatchDeleted),
        RouteEntry("POST", "/v1/messages/count_tokens", messages.count_tokens, CountRequest, Count),
    )
)  # fmt: skip
"""Anthropic's API, whose clients expect errors of their own form."""

_GENERATION: tuple[RouteEntry, ...] = (
    RouteEntry("POST", "/v1/completions", completions, CompletionRequest, CompletionReply),
    RouteEntry("POST", "/v1/chat/completions", chat_completions, ChatRequest, ChatReply),
    RouteEntry(
        "POST", "/v1/completions/render", rendering.render_completions,
        CompletionRequest, list[rendering.Rendered],
    ),
    RouteEntry(
        "POST", "/v1/chat/completions/render", rendering.render_chat_completions,
        ChatRequest, rendering.Rendered,
    ),
    RouteEntry("POST", "/v1/responses", responses.create, ResponsesRequest, ResponseObject),
    RouteEntry(
        "POST", "/v1/responses/input_tokens", responses.input_tokens, ResponsesRequest, InputTokens
    ),
    RouteEntry(
        "POST", "/v1/responses/compact", responses.compact, ResponsesRequest, CompactedResponse
    ),
    RouteEntry("GET", "/v1/responses/{id}", responses.retrieve, gives=ResponseObject),
    RouteEntry("DELETE", "/v1/responses/{id}", responses.delete, gives=responses.Deleted),
    RouteEntry("GET", "/v1/responses/{id}/input_items", responses.input_items, gives=InputItems),
    RouteEntry("POST", "/v1/responses/{id}/cancel", responses.cancel, gives=ResponseObject),
    RouteEntry("POST", "/v1/conversations", conversations.create,
               conversations.CreateConversation, conversations.ConversationObject),
    RouteEntry("GET", "/v1/conversations/{id}", conversations.retrieve,
               gives=conversations.ConversationObject),
    RouteEntry("POST", "/v1/conversations/{id}", conversations.update,
               conversations.UpdateConversation, conversations.ConversationObject),
    RouteEntry("DELETE", "/v1/conversations/{id}", conversations.delete,
               gives=conversations.ConversationDeleted),
    RouteEntry("GET", "/v1/conversations/{id}/items", conversations.list_items, gives=InputItems),
    RouteEntry("POST", "/v1/conversations/{id}/items", conversations.create_items,
               conversations.CreateItems, InputItems),
    RouteEntry("GET", "/v1/conversations/{id}/items/{item_id}", conversations.retrieve_item),
    RouteEntry("DELETE", "/v1/conversations/{id}/items/{item_id}", conversations.delete_item,
               gives=conversations.ConversationObject),
)  # fmt: skip

_ROUTES: tuple[RouteEntry, ...] = (
    RouteEntry("GET", "/", page),
    *PAGE_ROUTES,
    *HEALTH_ROUTES,
    *(RouteEntry("POST", path, health.unserved) for path in UNSERVED),
    RouteEntry("POST", "/v1/load_lora_adapter", adapters.load_adapter,
               adapters.LoadAdapterRequest),
    RouteEntry("POST", "/v1/unload_lora_adapter", adapters.unload_adapter,
               adapters.UnloadAdapterRequest),
    RouteEntry("GET", "/v1/models", models.models, gives=models.ModelList),
    RouteEntry("GET", "/v1/models/{name:path}", models.model, gives=models.ModelCard),
    *(replace(entry, needs="generate") for entry in (*_GENERATION, *_MESSAGES)),
    *_POOLING,
    RouteEntry("POST", "/invocations", invocations),
    RouteEntry("POST", "/tokenize", tokens.tokenize, tokens.TokenizeRequest, tokens.TokenizeReply),
    RouteEntry(
        "POST", "/detokenize", tokens.detokenize, tokens.DetokenizeRequest, tokens.DetokenizeReply
    ),
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

TOKENIZER_INFO = RouteEntry("GET", "/tokenizer_info", tokens.tokenizer_info)
"""Served with --enable-tokenizer-info-endpoint."""

TOKENS_OUT = RouteEntry(
    "POST", "/inference/v1/generate", generate_tokens, TokensRequest, TokensReply, needs="generate"
)
"""Served with --enable-scale-out."""
