"""Context of every handler: the engine, the model's names, the settings and the limits."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend.output_stream import Outputs, close_all
from quire.engine.wire.prompt_media import PlacedPrompt, PromptMedia
from quire.errors import InvalidParameter
from quire.observability.history import MetricsHistory
from quire.observability.tracing import HEADERS
from quire.params import RequestParams, SamplingParams
from quire.params.structured import StructuredOutputsParams
from quire.plugins import resolve_reference
from quire.prompts import BegunPrompt
from quire.server.abilities import Abilities, Ability
from quire.server.adapters import ServedAdapters
from quire.server.form_fields import check_parts, name_whole, note_unenforced
from quire.server.http.event_stream import EventStream
from quire.server.http.failures import Refusal, error_response
from quire.server.http.fields import (
    BODY_SLOT,
    CUT_SLOT,
    IGNORED_SLOT,
    LOST_SLOT,
    NamesFields,
    name_as_sent,
)
from quire.server.http.in_flight import ID_SLOT, TRACE_SLOT, InFlightRequests, own_request_id
from quire.server.http.json_body import BodyBudget, FieldRules, T, read_body, read_json
from quire.server.http.security import owner_of
from quire.server.long_texts import LongTexts
from quire.server.openai.requests import GenerationFields, Limits
from quire.server.owned_store import OwnedStore
from quire.server.settings import ChatSettings, PoolingSettings, ReplySettings
from quire.step.media import EMBEDS
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.io_processor import IOProcessor
    from quire.server.anthropic.message_batch import MessageBatch
    from quire.server.responses.stored_conversation import Conversation
    from quire.server.responses.stored_response import StoredResponse

ADAPTER_SLOT = "quire.adapter"
"""Key of the LoRARequest of the adapter that a request names, in the state of its scope."""

_MOST_LISTED = 20
"""Names of adapters that a reply lists."""
_LARGE_BODIES = 4
"""Number of the largest bodies that may be held at once."""
AbortElsewhere = Callable[[Sequence[str] | None], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, with its parameters, and its media at their places among the ids;
    `text` is None for one that came as ids. `output_ids`: what it goes on after.
    """

    text: str | None
    ids: list[int]
    params: SamplingParams
    media: PromptMedia | None = None
    output_ids: Sequence[int] = field(default=(), kw_only=True)

    @property
    def num_media_tokens(self) -> int:
        items = () if self.media is None else self.media.items
        return sum(item.num_rows for item in items if item.modality != EMBEDS)

    def form_parts(self) -> Sequence[tuple[str, StructuredOutputsParams]]:
        """Forms that the output's form is made of, by their fields; none where one field has it."""
        return ()

    def field_at(self, pointer: str) -> str:
        """The field of the request with a place in the schema of its form."""
        form = self.params.structured_outputs
        kind = "" if form is None else f".{form.kind}"
        return f"structured_outputs{kind}{pointer}"


class NamesModel(Protocol):
    """A body that says which model is asked."""

    model: str | None


M = TypeVar("M", bound=NamesModel)


class Routed(Protocol):
    """The fields of a body that say how its prompts are run."""

    cache_salt: str | None
    priority: int | None
    data_parallel_rank: int | None


@dataclass(frozen=True)
class Server:
    """One model served over HTTP. `names`: its names, of which replies have the first."""

    engine: AsyncLLM
    tokenizer: Tokenizer | None
    names: Sequence[str]
    root: str
    limits: Limits
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    chat: ChatSettings = field(default_factory=ChatSettings)
    pooling: PoolingSettings = field(default_factory=PoolingSettings)
    replies: ReplySettings = field(default_factory=ReplySettings)
    field_rules: FieldRules = field(default_factory=FieldRules)
    num_keys: int = 0
    metrics_prefix: str = "vllm:"
    in_flight: InFlightRequests = field(default_factory=InFlightRequests)
    responses: OwnedStore[StoredResponse] = field(default_factory=OwnedStore)
    conversations: OwnedStore[Conversation] = field(default_factory=OwnedStore)
    batches: OwnedStore[MessageBatch] = field(default_factory=OwnedStore)
    created: int = field(default_factory=lambda: int(time.time()))
    abort_elsewhere: AbortElsewhere | None = None
    texts: LongTexts | None = None
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    io_processor: IOProcessor | None = None
    history: MetricsHistory = field(default_factory=MetricsHistory)

    @cached_property
    def abilities(self) -> Abilities:
        limits = self.engine.front_end.inputs.limits
        return Abilities(limits.pooling, limits.generates)

    @cached_property
    def body_budget(self) -> BodyBudget:
        return BodyBudget(_LARGE_BODIES * self.limits.body_bytes)

    def close(self) -> None:
        """End the processes that it has started; the engine is its caller's."""
        if self.texts is not None:
            self.texts.close()

    async def abort_shown(self, names: Sequence[str] | None) -> int:
        """Abort requests by clients' names (None: all), in all API servers; returns how many."""
        num_elsewhere = 0 if self.abort_elsewhere is None else await self.abort_elsewhere(names)
        return num_elsewhere + await self.abort_here(names)

    async def abort_here(self, names: Sequence[str] | None) -> int:
        """Abort the requests of this process only."""
        keys = self.in_flight.keys(names)
        await self.engine.abort(keys)
        return len(keys)

    async def read(self, request: Request, type: type[T], *, has_one_prompt: bool = False) -> T:
        """The request's body. `has_one_prompt`: the pictures in it are all of one prompt. Raises
        Refusal, and RequestError for too many pictures.
        """
        limits, pictures = self.limits, self.engine.front_end.inputs.pictures
        body = await read_json(
            request,
            type,
            self.field_rules,
            max_bytes=limits.body_bytes,
            timeout_s=limits.body_timeout_s,
            budget=self.body_budget,
            check=pictures.check_body if pictures is not None and has_one_prompt else None,
        )
        request.scope["state"][BODY_SLOT] = body
        return body

    async def read_bytes(self, request: Request) -> bytes:
        """The request's body as it came. Raises Refusal."""
        limits = self.limits
        return await read_body(request, limits.body_bytes, limits.body_timeout_s, self.body_budget)

    async def read_for_model(
        self, request: Request, type: type[M], *, has_one_prompt: bool = False
    ) -> M:
        """The body of a request to the model or to an adapter, which is found by its name; None is
        the model. `has_one_prompt`: see `read`. Raises Refusal, with 404 for another name, and
        RequestError for an adapter that cannot be loaded.
        """
        body = await self.read(request, type, has_one_prompt=has_one_prompt)
        name = body.model
        if name and name not in self.names:
            adapter = await self.adapters.find(name)
            if adapter is None:
                raise self.unknown_model(name)
            request.scope["state"][ADAPTER_SLOT] = adapter
        return body

    def unknown_model(self, name: str) -> Refusal:
        """The reply (404) to a name that is neither the model's nor that of an adapter."""
        listed = [*self.names, *islice(self.adapters.named, _MOST_LISTED)]
        text = f"The model `{name[:200]}` does not exist. Valid aliases: {', '.join(listed)}"
        return Refusal(404, text, param="model")

    def name_of(self, asked: str | None) -> str:
        """The model's name in replies: the name of the adapter that was asked for, which may have
        been unloaded since, else the first of the model's.
        """
        return asked if asked and asked not in self.names else self.names[0]

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer, or Refusal (501) of an engine without one."""
        if self.tokenizer is None:
            raise Refusal(501, "This engine has no tokenizer; send token ids to /v1/completions.")
        return self.tokenizer

    def need_texts(self) -> LongTexts:
        """Tokenizes and renders; raises Refusal (501) for an engine without a tokenizer."""
        self.need_tokenizer()
        assert self.texts is not None, "servers with a tokenizer are made with it"
        return self.texts

    def tell_cut(self, request: Request, body: GenerationFields, prompts: Sequence[Prompt]) -> None:
        """Say in `X-Adjusted-Fields` how many tokens there may be, where more were asked for."""
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(body, name)
        allowed = min((prompt.params.max_tokens or 0 for prompt in prompts), default=0)
        if asked is not None and allowed < asked:
            state = request.scope["state"]
            sent = state.get(BODY_SLOT)
            shown = sent.field_of(name) if isinstance(sent, NamesFields) else name
            state[CUT_SLOT] = f"{shown}={allowed}"

    def check_logprobs(self, body: GenerationFields, prompts: Sequence[Prompt]) -> None:
        """Raise InvalidParameter for a request whose reply may have too many logprobs."""
        given = [(len(prompt.ids), prompt.params) for prompt in prompts]
        vocab_size = self.engine.front_end.inputs.limits.vocab_size
        body.check_logprobs(self.limits, vocab_size, given)

    async def start(
        self,
        request: Request,
        body: GenerationFields,
        name: RequestName,
        prompts: Sequence[Prompt],
        *,
        is_step: bool = False,
    ) -> list[Outputs]:
        """Add the prompts of one request to the engine: all of them, or none; `is_step`: those of
        one step of a search, whose parameters are not the request's. Raises RequestError,
        CapacityError, EngineDeadError before any part of a reply is sent.
        """
        if not is_step:
            self.check_logprobs(body, prompts)
            self.tell_cut(request, body, prompts)
        streams: list[Outputs] = []
        try:
            for index, prompt in enumerate(prompts):
                key = f"{name.key}-{index}"
                adding = partial(
                    self.add,
                    *(request, body, key, name.shown, prompt.ids, prompt.params),
                    media=prompt.media,
                    output_ids=prompt.output_ids,
                )
                form = prompt.params.structured_outputs
                stream = adding() if form is None else self._add_formed(request, prompt, adding)
                streams.append(await stream)
        # cancellation is one: the prompts that were added must not go on without a reader
        except BaseException:
            await close_all(streams)
            raise
        return streams

    async def _add_formed(
        self, request: Request, prompt: Prompt, adding: Callable[[], Awaitable[Outputs]]
    ) -> Outputs:
        """Add a prompt by `adding`; errors and headers name what its form was made from."""
        inputs, parts = self.engine.front_end.inputs, prompt.form_parts()
        await check_parts(inputs, parts)
        try:
            stream = await adding()
        except InvalidParameter as error:
            name_whole(error, parts)
            raise
        form = prompt.params.structured_outputs
        assert form is not None
        pointers = inputs.generation.unenforced(form)
        note_unenforced(request, map(prompt.field_at, pointers))
        return stream

    async def add(
        self,
        request: Request,
        body: Routed,
        key: str,
        shown: str,
        ids: list[int],
        params: RequestParams,
        media: PromptMedia | None = None,
        output_ids: Sequence[int] = (),
    ) -> Outputs:
        """Add a prompt to the engine as `key`, for the client `shown`. Raises what `start` does."""
        salt = self.salt(request, body.cache_salt) or None
        given: Any = PlacedPrompt(ids, media, cache_salt=salt)
        if output_ids:
            given = BegunPrompt(given, list(output_ids))
        mailbox = await self.engine.add_request(
            key,
            given,
            params,
            priority=_priority(request, body.priority),
            data_parallel_rank=_rank(request, body.data_parallel_rank),
            trace_headers={n: request.headers[n] for n in HEADERS if n in request.headers},
            lora_request=request.scope["state"].get(ADAPTER_SLOT),
        )
        if mailbox.traceparent is not None:
            request.scope["state"].setdefault(TRACE_SLOT, mailbox.traceparent)
        # the client keeps the media of requests within a bound, and could not give those beyond it
        # to a new core
        if not mailbox.survives:
            request.scope["state"][LOST_SLOT] = "media"
        self.in_flight.enter(key, shown)
        return Outputs(mailbox, partial(self._leave, key, mailbox.request_id))

    async def _leave(self, key: str, internal_id: str) -> None:
        self.in_flight.leave(key)
        await self.engine.abort(internal_id, internal=True)

    def stream(self, events: AsyncGenerator[bytes], streams: Sequence[Outputs]) -> EventStream:
        """The response that sends `events`, made from `streams`, which it closes."""
        return EventStream(
            events,
            on_end=partial(close_all, streams),
            keep_alive_s=self.replies.keep_alive_s,
            stall_s=self.limits.reader_timeout_s,
        )

    def salt(self, request: Request, asked: str | None) -> str | None:
        """The cache salt of a prompt: with several keys each key has its own cached blocks."""
        # times to the first token would tell one key's clients what another's have asked
        digest = owner_of(request) if self.num_keys > 1 else None
        if digest is None:
            return asked
        return f"{digest.hex()}:{asked or ''}"


@dataclass(frozen=True, slots=True)
class RequestName:
    """The id of a reply. `shown` may come from the client and is never used as a key."""

    shown: str
    key: str
    created: int

    @classmethod
    def of(cls, request: Request, prefix: str, asked: str | None = None) -> RequestName:
        """The id of a request: X-Request-Id, else the body's `request_id`, else random."""
        base = own_request_id(request) or asked or request.scope["state"][ID_SLOT]
        return cls(f"{prefix}{base}", f"{prefix}{secrets.token_hex(12)}", int(time.time()))

    def another(self) -> RequestName:
        """A name for a further part of the same request."""
        prefix = self.shown.partition("-")[0]
        return replace(self, key=f"{prefix}-{secrets.token_hex(12)}")

    @classmethod
    def random(cls, prefix: str) -> RequestName:
        """An id that no client can choose or guess."""
        name = f"{prefix}{secrets.token_hex(16)}"
        return cls(name, name, int(time.time()))


_PRIORITY = re.compile("-?[0-9]{1,10}")


def _priority(request: Request, asked: int | None) -> int:
    """The priority header, which a proxy may set, else the body's field."""
    text = request.headers.get("x-vllm-priority") or request.headers.get("x-quire-priority")
    if text is None:
        return asked or 0
    if not _PRIORITY.fullmatch(text):
        raise Refusal(400, "The priority header must be an integer.", param="priority")
    return int(text)


def _rank(request: Request, asked: int | None) -> int | None:
    """The core that the body or a header asks for; a header that is not a number is ignored."""
    text = request.headers.get("x-data-parallel-rank", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else asked


_CLIENT_GONE = 499
"""Status in the access log of a client that has disconnected."""

Handler: TypeAlias = Callable[[Server, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One route: methods, path, handler, the types of its bodies (None: without one) and of its
    query. `failure`: an error as a reply. `needs`: what the model must be able to do. `is_alias`:
    another path of a route that is documented by its own. Handlers and types of routes that few
    servers answer are names, "module:attribute", whose modules the first request imports.
    """

    methods: str
    path: str
    handler: Handler | str
    takes: type | str | None = None
    gives: type | str | None = None
    query: type | str | None = None
    failure: Callable[[BaseException], Response] = error_response
    needs: Ability | None = None
    is_alias: bool = False

    def is_for(self, server: Server) -> bool:
        return self.needs is None or server.abilities.have(self.needs)

    def served_by(self, server: Server) -> RouteEntry:
        """The route, or one that refuses what the model cannot do."""
        if self.needs is None or self.is_for(server):
            return self
        return replace(self, handler=partial(_refuse, self.needs))

    def loaded(self) -> RouteEntry:
        """The route with its handler and types imported."""
        named = {"handler": self.handler, "takes": self.takes, "gives": self.gives}
        named["query"] = self.query
        return replace(self, **{name: resolve_reference(given) for name, given in named.items()})

    async def answer(self, server: Server, request: Request) -> Response:
        """The reply to a request, also to one that fails."""
        state = request.scope["state"]
        try:
            handler = self.handler
            if isinstance(handler, str):
                handler = resolve_reference(handler)
            return await handler(server, request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            name_as_sent(error, state.get(BODY_SLOT), state.get(IGNORED_SLOT, ()))
            return self.failure(error)
        finally:
            server.body_budget.release(state)


async def _refuse(needs: Ability, server: Server, request: Request) -> Response:
    raise server.abilities.refusal_of(needs)
