"""Step 3 of 8: a prompt and its parameters become an `EngineCoreRequest`, or an error that names
what is wrong.

In: what the caller gave. Out: token ids, checked and completed parameters, a concrete seed:
everything that the core needs. After this step a request is no longer refused as invalid. Next:
engine/client/ carries it to the core.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from quire.config.plan_parts import ModelPlan, SamplingPlan
from quire.distributed.peers.params import check_params
from quire.engine.arguments import refuse_keywords
from quire.engine.counterparts import HasCounterparts
from quire.engine.frontend.custom_params import CustomParams
from quire.engine.frontend.pooling_input import (
    TRUNCATE,
    PoolingFacts,
    PoolingInputs,
    take_truncation,
    with_truncation,
)
from quire.engine.wire.declared_types import check_message
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.engine.wire.prompt_media import PlacedPrompt
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, PromptTooLong, RequestError
from quire.grammar.thinking import num_thinking
from quire.lora.request import ADAPTERS_ARE_OFF, LoRARequest, check_lora_request
from quire.params import PoolingParams, RequestParams, SamplingParams, checks
from quire.params.structured import StructuredOutputsParams
from quire.params.thinking import Thinking
from quire.prompts import BegunPrompt, ParsedPrompt, has_media, parse_prompt
from quire.request_options import RequestOptions
from quire.text.encode_options import encode_options
from quire.text.tokenizer import Tokenizer, encode_prompt

if TYPE_CHECKING:  # few engines take more than text
    from quire.engine.frontend.embeds.prompts import EmbeddedPrompts
    from quire.engine.frontend.pictures.prompts_with_pictures import PromptsWithPictures
    from quire.grammar.trial import GrammarTrials
    from quire.media.loader import LoadedPicture

SEED_MASK = 2**64 - 1

_LATEST_S = 1e12
"""The latest time of arrival: in the year 33658."""

_UNBUILT_PARAMS = {
    "watermarking": "Leave it out.",
}
_PROMPT_END = 256
"""Tokens of a prompt that can tell whether its output begins inside a reasoning."""
_UNBUILT_EXTRA_ARGS = ("ec_transfer_params", "kv_cache_report_mode")
_TRANSFER = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model and the engine that requests are checked against.

    `vocab_size` is the number of ids that the model embeds. `eos_token_ids` are those of the
    generation config. `max_logprobs` -1 means no limit. `reports_experts`: with
    `enable_return_routed_experts`. `generates`: requests may ask for text. `pooling`: of an engine
    that pools. `serves_adapters`: with `enable_lora`. `has_connector`: requests may bring
    `kv_transfer_params`.
    """

    vocab_size: int
    max_len: int
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()
    reports_experts: bool = False
    generates: bool = True
    pooling: PoolingFacts | None = None
    serves_adapters: bool = False
    has_connector: bool = False
    logprobs_mode: str = "raw_logprobs"

    @classmethod
    def of_plan(
        cls,
        model: ModelPlan,
        sampling: SamplingPlan,
        *,
        reports_experts: bool,
        pooling: PoolingFacts | None,
        serves_adapters: bool,
        has_connector: bool,
    ) -> Self:
        """The limits of an engine, by the parts of its plan that have most of them."""
        return cls(
            vocab_size=model.vocab_size,
            max_len=model.max_model_len,
            max_logprobs=sampling.max_logprobs,
            eos_token_ids=sampling.generation_eos_token_ids,
            reports_experts=reports_experts,
            generates=model.generates,
            pooling=pooling,
            serves_adapters=serves_adapters,
            has_connector=has_connector,
            logprobs_mode=sampling.logprobs_mode,
        )


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Delimiters of reasoning; `is_assumed`: outputs begin inside, unless the prompt has one."""

    start: str
    end: str
    is_assumed: bool = False


class FormPlaces(Protocol):
    """Places where forms begin in the outputs of prompts."""

    def placed(self, form: StructuredOutputsParams, prompt_end: str) -> StructuredOutputsParams:
        """The form in an output of a prompt that ends so."""
        ...


class LoadedPrompt(NamedTuple):
    """A prompt whose pictures are loaded already."""

    prompt: Any
    pictures: list[LoadedPicture]


class KindOfInputs(Protocol):
    """Makes the messages of requests whose parameters are of one kind."""

    def process(
        self,
        parsed: ParsedPrompt,
        params: Any,
        tokenization_kwargs: Mapping[str, Any] | None,
        **known: Any,
    ) -> EngineCoreRequest: ...


class InputProcessor(HasCounterparts):
    """Checks and completes requests, by their parameters with `generation` or for pooling."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        *,
        seed: int | None,
        forms: GrammarTrials | None = None,
        custom: CustomParams | None = None,
        pictures: PromptsWithPictures | None = None,
        embeds: EmbeddedPrompts | None = None,
    ) -> None:
        """`seed`: see `GenerationInputs`. `forms` checks structured outputs; without it they are
        refused. `custom` asks the engine's logits processors, if it has some. `pictures`: of an
        engine that takes some, and `embeds` of one that takes embeddings.
        """
        self.pictures = pictures
        """Expands pictures in prompts; None for an engine of text alone."""
        self.embeds = embeds
        """Takes embeddings as prompts; None for an engine that takes none."""
        self.tokenizer = tokenizer
        """The model's tokenizer; None for an engine without one."""
        self.limits = limits
        self.generation = GenerationInputs(tokenizer, limits, seed=seed, forms=forms, custom=custom)
        self._by_kind: dict[type[RequestParams], KindOfInputs] = {}
        if limits.generates:
            self._by_kind[SamplingParams] = self.generation
        if limits.pooling is not None:
            self._by_kind[PoolingParams] = PoolingInputs(
                tokenizer,
                limits.pooling,
                vocab_size=limits.vocab_size,
                max_len=limits.max_len,
            )

    def process(
        self,
        prompt: object,
        params: RequestParams,
        options: RequestOptions,
        **known: Any,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the message for the core, and the prompt's text if it is known. The caller's
        `params` are not modified; `known` are further fields of the message, which is complete and
        of the declared types. Raises subclasses of RequestError, and changes nothing if it does.
        """
        fields = self._fields(options, **known)
        if isinstance(prompt, BegunPrompt):
            fields["output_token_ids"] = prompt.output_token_ids
            prompt = prompt.prompt
        inputs = self._inputs_of(params)
        given = options.tokenization_kwargs
        encoding = {} if given is None else encode_options(given)
        placed = self._placed(prompt, params, encoding)
        if placed is None:
            parsed = parse_prompt(prompt)
        else:
            parsed = ParsedPrompt(placed.text, placed.token_ids, placed.cache_salt)
            if placed.media is not None:
                fields["media"] = placed.media
        request = inputs.process(parsed, params, encoding, cache_salt=parsed.cache_salt, **fields)
        # here, as a value of another type could break the core's queue for all requests
        check_message(request)
        return request, parsed.text

    def _placed(
        self, prompt: object, params: RequestParams, encoding: Mapping[str, Any]
    ) -> PlacedPrompt | None:
        """A prompt with its media in their places; None for one that is to be read first."""
        if isinstance(prompt, PlacedPrompt):
            return prompt
        loaded = None
        if isinstance(prompt, LoadedPrompt):
            prompt, loaded = prompt
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            _refuse_truncation(params, encoding)
            parsed = parse_prompt(prompt)
            ids, media = self.require_embeds().placed(parsed, params)
            return PlacedPrompt(ids, media, parsed.text, parsed.cache_salt)
        if not has_media(prompt):
            return None
        parsed, pictures = parse_prompt(prompt), self.require_pictures()
        assert parsed.media is not None, "it has some"
        # a cut might go through the tokens of a picture
        _refuse_truncation(params, encoding)
        found = pictures.load(parsed.media) if loaded is None else loaded
        return pictures.placed(parsed, found, encoding)

    async def loaded(self, prompt: Any) -> Any:
        """A prompt for `process` whose pictures are loaded, so that it does not block; one without
        pictures as it is. Raises RequestErrors.
        """
        if self.pictures is None or not has_media(prompt):  # `process` refuses media then
            return prompt
        media = parse_prompt(prompt).media
        assert media is not None, "it has some"
        return LoadedPrompt(prompt, await self.pictures.loaded(media))

    def chat_prompt(self, messages: Any, render: Callable[..., str]) -> Any:
        """A conversation as a prompt, by `render`, with pictures where the engine takes some."""
        if self.embeds is not None:
            from quire.engine.frontend.embeds.chat import EmbeddedChat, has_embeds

            if has_embeds(messages):
                assert self.tokenizer is not None, "conversations are rendered with one"
                chat = EmbeddedChat(messages, self.embeds.width)
                encode = partial(self.tokenizer.encode, add_special_tokens=False)
                pieces = map(encode, chat.pieces(render(chat.messages)))
                return chat.prompt(list(pieces)).content()
        return render(messages) if self.pictures is None else self.pictures.chat(messages, render)

    def content_prompt(self, parts: Sequence[Any]) -> dict[str, Any]:
        """The prompt of a message's parts without a template: its text, and its pictures. Raises
        RequestError for an engine of text alone.
        """
        text, found = self.require_pictures().content(parts)
        return {"prompt": text, "multi_modal_data": {"image": found}}

    @property
    def takes_pictures(self) -> bool:
        return self.pictures is not None

    def require_embeds(self) -> EmbeddedPrompts:
        """The reader of prompts as embeddings. Raises RequestError where the engine takes none."""
        if self.embeds is None:
            raise RequestError(
                "You must set `--enable-prompt-embeds` to input `prompt_embeds`.",
                parameter="prompt_embeds",
            )
        return self.embeds

    def require_pictures(self) -> PromptsWithPictures:
        """The reader of prompts with pictures. Raises RequestError where the engine takes none."""
        if self.pictures is None:
            raise RequestError(
                "This engine takes text alone: its model takes no pictures, or the engine was "
                "started without them (language_model_only, or what the log of its start says).",
                parameter="multi_modal_data",
            )
        return self.pictures

    def open(
        self, params: SamplingParams, options: RequestOptions, **known: Any
    ) -> EngineCoreRequest:
        """As `process`, for a prompt that comes in parts: checks all else, and draws the seed."""
        fields = self._fields(options, **known)
        if options.tokenization_kwargs is not None:
            encode_options(options.tokenization_kwargs)
        if not self.limits.generates:
            self._inputs_of(params)
        request = self.generation.open(params, **fields)
        check_message(request)
        return request

    def _fields(self, options: RequestOptions, **known: Any) -> dict[str, Any]:
        """The fields of a message that depend on neither prompt nor parameters."""
        arrived, rank = options.arrival_time, options.data_parallel_rank
        return {
            **known,
            "arrival_time": _arrival_time(time.time() if arrived is None else arrived),
            "priority": _priority(options.priority),
            "adapter": self._adapter(options.lora_request),
            "data_parallel_rank": None if rank is None else _rank(rank),
            "resumable": options.resumable,
        }

    def _inputs_of(self, params: object) -> KindOfInputs:
        """The processing of requests with such parameters. Raises RequestError if there is none."""
        for kind, inputs in self._by_kind.items():
            if isinstance(params, kind):
                return inputs
        if isinstance(params, PoolingParams):
            hint = "Give SamplingParams, or start the engine with runner='pooling'."
            raise InvalidType("params", params, "this engine generates text", hint)
        if isinstance(params, SamplingParams):
            raise RequestError(
                "This engine pools prompts and generates no text. Give PoolingParams, or start it "
                "with runner='generate' on a model that generates (with convert='embed' it pools "
                "as well)."
            )
        kinds = " or ".join(kind.__name__ for kind in self._by_kind)
        raise InvalidType("params", params, f"it must be a {kinds}")

    def process_inputs(
        self,
        request_id: str,
        prompt: object,
        params: SamplingParams | PoolingParams,
        supported_tasks: Sequence[str] | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        resumable: bool = False,
        **unbuilt: Any,
    ) -> EngineCoreRequest:
        """A checked request, to be given to `add_request` or `generate` as the prompt (which take
        none that is resumable); the engine is not changed. `supported_tasks`, if given, are the
        engine's. Raises subclasses of RequestError.
        """
        refuse_keywords(unbuilt)
        if supported_tasks is not None:
            self._check_tasks(supported_tasks)
        options = RequestOptions(
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            resumable=resumable,
        )
        request, text = self.process(
            prompt,
            params,
            options,
            handle=-1,
            request_id=checks.text("request_id", request_id),
            trace_headers=checked_headers(trace_headers),
        )
        request.prompt_text = text
        return request

    def _check_tasks(self, tasks: object) -> None:
        """Raise InvalidParameter for tasks that are not those of an engine like this one."""
        generates = self.limits.generates
        if not isinstance(tasks, tuple | list) or ("generate" in tasks) != generates:
            allowed = "they are those of the engine's get_supported_tasks()"
            raise InvalidParameter("supported_tasks", tasks, allowed)

    def prepare(self, params: object) -> Future[None] | None:
        return self.generation.prepare(params)

    def close(self) -> None:
        self.generation.close()
        if self.pictures is not None:
            self.pictures.close()

    def _adapter(self, asked: LoRARequest | None) -> AdapterRef | None:
        if asked is None:
            return None
        if not self.limits.serves_adapters:
            raise RequestError(ADAPTERS_ARE_OFF, parameter="lora_request")
        return AdapterRef.of(check_lora_request(asked))


class GenerationInputs:
    """Makes the messages of requests with SamplingParams. `seed` (None: random) derives the seeds
    of requests without one.

    With a seed, the n-th request without a seed of its own gets the same one in every run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        *,
        seed: int | None,
        forms: GrammarTrials | None,
        custom: CustomParams | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._forms = forms
        self.custom = custom
        self._seed = seed
        self.reasoning_marks: ReasoningMarks | None = None
        """Needed to bound the reasoning of a request."""
        self.form_places: FormPlaces | None = None
        """Needed where the engine's config names the reasoning that forms begin after."""
        self._num_drawn = 0

    def process(
        self,
        parsed: ParsedPrompt,
        params: SamplingParams,
        tokenization_kwargs: Mapping[str, Any] | None,
        seed: int | None = None,
        **known: Any,
    ) -> EngineCoreRequest:
        """Return the message for the core; some of its fields are `known`. `seed`: one that is
        drawn already, for parameters without one. Raises RequestError.
        """
        own = self._own_params(params)
        if parsed.token_types is not None:
            allowed = "models that generate have no types of tokens"
            raise InvalidParameter("token_type_ids", parsed.token_types, allowed, "Leave it out.")
        if own.truncate_prompt_tokens is not None:
            tokenization_kwargs = with_truncation(tokenization_kwargs, own.truncate_prompt_tokens)
        token_ids = self.prompt_token_ids(parsed, tokenization_kwargs)
        self._check_experts_start(own.routed_experts_prompt_start, len(token_ids))
        own.check_scored_rows(len(token_ids))
        own.limit_output(self._limits.max_len - len(token_ids))
        self._check_trace(own)
        own.follow_trace(self._limits.max_len - len(token_ids))
        self._complete_form(own, token_ids)
        thinking = self._thinking(own, token_ids)
        if seed is None or own.seed is not None:
            seed = self._seed_of(own)  # counts, so nothing is refused after it
        return EngineCoreRequest(
            prompt_token_ids=token_ids, params=own, seed=seed, thinking=thinking, **known
        )

    def open(self, params: SamplingParams, **known: Any) -> EngineCoreRequest:
        """The message of a prompt whose first part is still to come. Raises RequestError."""
        own = self._own_params(params)
        if own.trace_decode_token_ids:
            allowed = "it cannot be used with a prompt whose parts are still to come"
            raise InvalidParameter("trace_decode_token_ids", own.trace_decode_token_ids, allowed)
        self._complete_form(own, [])
        # the parts that are still to come have one token at least
        own.limit_output(self._limits.max_len - 1)
        return EngineCoreRequest(params=own, seed=self._seed_of(own), **known)

    def _own_params(self, params: SamplingParams) -> SamplingParams:
        """Copy the parameters, check them against the model, and add all that ends a request."""
        own = params.clone()
        own.validate()
        _refuse_unbuilt_params(own)
        limits = self._limits
        _check_transfer(own, has_connector=limits.has_connector)
        own.check_for_model(vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
        eos = None if self._tokenizer is None else self._tokenizer.eos_token_id
        own.update_from_generation_config({"eos_token_id": list(limits.eos_token_ids)}, eos)
        # after the stop tokens of the model have joined those of the request
        _check_allowed_ids(own)
        if self.custom is not None:
            self.custom.check(own)
        self._encode_bad_words(own)
        if own.scores_prompt:
            own.skip_reading_prefix_cache = True  # a cached block has no logits to report
        if own.stop and self._tokenizer is None:
            hint = "Give stop_token_ids, or an engine with a tokenizer."
            raise InvalidParameter("stop", own.stop, "the engine has no tokenizer", hint)
        return own

    def prepare(self, params: object) -> Future[None] | None:
        if self._forms is None or not isinstance(params, SamplingParams):
            return None
        form = params.structured_outputs
        return None if form is None else self._forms.submit(form)

    def _complete_form(self, own: SamplingParams, prompt: Sequence[int]) -> None:
        """Place the form in the outputs of this prompt, and check it. Raises InvalidParameter."""
        form = own.structured_outputs
        if form is None:
            return
        if self._forms is not None and self._forms.reasoning_parser:
            if self.form_places is None:
                name = "structured_outputs_config['reasoning_parser']"
                hint = "LLM and servers place forms by it; else give a starts_after in its place."
                raise NotBuiltYet(name, self._forms.reasoning_parser, hint)
            if form.starts_after is None and self._tokenizer is not None:
                form = self.form_places.placed(form, self._tokenizer.decode(prompt[-_PROMPT_END:]))
        own.structured_outputs = self.check_form(form)

    def check_form(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        """A form with the engine's settings. Raises InvalidParameter for one that is not served."""
        if self._forms is None:
            hint = "Give an engine with a tokenizer."
            allowed = "the engine has no tokenizer"
            raise InvalidParameter("structured_outputs", form.kind, allowed, hint)
        name = "structured_outputs.starts_after"
        checks.in_vocabulary(name, form.starts_after_ids, self._limits.vocab_size)
        completed = self._forms.completed(form)
        self._forms.check(completed)
        return completed

    def unenforced(self, form: StructuredOutputsParams) -> Sequence[str]:
        """Return pointers to the keywords of a checked form's schemas that are annotations."""
        return () if self._forms is None else self._forms.unenforced(form)

    def close(self) -> None:
        if self._forms is not None:
            self._forms.close()

    def _check_experts_start(self, start: int, prompt_len: int) -> None:
        name = "routed_experts_prompt_start"
        if start and not self._limits.reports_experts:
            hint = "Start the engine with enable_return_routed_experts, or leave it out."
            raise InvalidParameter(name, start, "the engine does not report experts", hint)
        if start > prompt_len:
            allowed = f"it must be at most {prompt_len}, the tokens of the prompt"
            raise InvalidParameter(name, start, allowed)

    def _check_trace(self, own: SamplingParams) -> None:
        mode = self._limits.logprobs_mode
        if own.trace_decode_token_ids and own.logprobs is not None and mode.startswith("processed"):
            allowed = f"with logprobs_mode={mode!r} the logprobs of a given output say nothing"
            raise InvalidParameter("trace_decode_token_ids", own.trace_decode_token_ids, allowed)

    def _thinking(self, own: SamplingParams, prompt: list[int]) -> Thinking | None:
        budget, marks = own.thinking_token_budget, self.reasoning_marks
        if budget is None:
            return None
        if marks is None or self._tokenizer is None:
            hint = "Give reasoning_config, or a server a --reasoning-parser with marks."
            allowed = "it is not known how this model marks its reasoning"
            raise InvalidParameter("thinking_token_budget", budget, allowed, hint)
        start, end = (
            self._tokenizer.encode(mark, add_special_tokens=False)
            for mark in (marks.start, marks.end)
        )
        num_before = _num_before(prompt, marks, start, end, self._tokenizer)
        return Thinking(budget, start, end, num_before)

    def _encode_bad_words(self, own: SamplingParams) -> None:
        if not own.bad_words:
            return
        if self._tokenizer is None:
            hint = "Give logit_bias instead, or an engine with a tokenizer."
            raise InvalidParameter("bad_words", own.bad_words, "the engine has no tokenizer", hint)
        own.update_from_tokenizer(self._tokenizer)
        for token_ids in own.bad_words_token_ids or ():
            checks.in_vocabulary("bad_words", token_ids, self._limits.vocab_size)

    def prompt_token_ids(
        self, parsed: ParsedPrompt, tokenization_kwargs: Mapping[str, Any] | None
    ) -> list[int]:
        """Return the prompt's ids; at least one more token fits the model. With
        `truncate_prompt_tokens` (-1: as many as fit) the last ones are left, or the first ones
        where `truncation_side` is "right". Raises InvalidParameter for an empty prompt or an
        unknown id, PromptTooLong.
        """
        token_ids, cut = parsed.token_ids, None
        if tokenization_kwargs and TRUNCATE in tokenization_kwargs:
            room = self._limits.max_len - 1
            tokenization_kwargs, cut = take_truncation(tokenization_kwargs, room, "left")
        if token_ids is None:
            token_ids = encode_prompt(self._tokenizer, parsed.text or "", tokenization_kwargs)
        elif cut is not None:
            token_ids = cut.of(token_ids)
        # before the ids are looked at one by one, of which there may be any number
        if len(token_ids) >= self._limits.max_len:
            raise PromptTooLong(len(token_ids), self._limits.max_len)
        checks.prompt_ids(token_ids, parsed.text, self._limits.vocab_size)
        return token_ids

    def _seed_of(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed & SEED_MASK
        if self._seed is None:
            return secrets.randbits(64)
        self._num_drawn += 1
        name = f"{self._seed}:{self._num_drawn}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _refuse_truncation(params: object, encoding: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for a prompt with pictures or embeddings that is to be cut."""
    given = encoding.get(TRUNCATE)
    if given is None and isinstance(params, SamplingParams | PoolingParams):
        given = params.truncate_prompt_tokens
    if given is not None:
        allowed = "a prompt with pictures or embeddings is not cut"
        raise InvalidParameter("truncate_prompt_tokens", given, allowed, "Shorten its text.")


def checked_headers(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """The headers of a request's trace as a dict. Raises InvalidType for anything else."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidType("trace_headers", given, "it must be a dict of strings")
    for each in (*given.keys(), *given.values()):
        checks.text("trace_headers", each)
    return dict(given)


def _arrival_time(given: object) -> float:
    allowed = "it must be a number of seconds since 1970"
    return checks.number("arrival_time", given, 0, _LATEST_S, allowed)


def _rank(given: object) -> int:
    allowed = "it must be the number of a core"
    return checks.integer("data_parallel_rank", given, 0, checks.MAX_INT, allowed)


def _priority(given: object) -> int:
    allowed = "it must be an int that fits 32 bits"
    return checks.integer("priority", given, -(2**31), 2**31 - 1, allowed)


def _num_before(
    prompt: list[int], marks: ReasoningMarks, start: list[int], end: list[int], tokenizer: Tokenizer
) -> int | None:
    """Return the tokens of the reasoning that a prompt ends in; None: it does not."""
    if len(start) == len(end) == 1:
        num_before, has_start = num_thinking(prompt, start, end), start[0] in prompt
    else:  # tokens of a mark may be joined to what stands next to it
        _, mark, inside = tokenizer.decode(prompt).rpartition(marks.start)
        has_start = bool(mark)
        is_open = has_start and marks.end not in inside
        num_before = len(tokenizer.encode(inside, add_special_tokens=False)) if is_open else None
    return 0 if num_before is None and marks.is_assumed and not has_start else num_before


def _check_allowed_ids(own: SamplingParams) -> None:
    """Raise where `min_tokens` forbids every token that is allowed."""
    allowed = own.allowed_token_ids
    if own.min_tokens and allowed and own.all_stop_token_ids.issuperset(allowed):
        rule = "with min_tokens, one of them must not end the completion"
        raise InvalidParameter("allowed_token_ids", allowed, rule)


def _check_transfer(params: SamplingParams, *, has_connector: bool) -> None:
    """Raise for `kv_transfer_params` that nothing reads, or that are not a dict."""
    given = (params.extra_args or {}).get(_TRANSFER)
    if given is None:
        return
    if not isinstance(given, dict):
        raise InvalidType(_TRANSFER, given, "it must be a dict")
    if given and not has_connector:
        allowed = "this engine has no connector that reads them"
        hint = "Start it with kv_transfer_config, or leave them out."
        raise InvalidParameter(_TRANSFER, given, allowed, hint)
    check_params(given)


def _refuse_unbuilt_params(params: SamplingParams) -> None:
    for name, hint in _UNBUILT_PARAMS.items():
        value = getattr(params, name)
        if value is not None:
            raise NotBuiltYet(name, value, hint)
    for name in _UNBUILT_EXTRA_ARGS:
        if params.extra_args and params.extra_args.get(name) is not None:
            hint = "Leave it out of extra_args."
            raise NotBuiltYet(f"extra_args[{name!r}]", params.extra_args[name], hint)
