"""The bodies of completion and chat completion requests, and their conversion to `SamplingParams`.

A field that is null counts as left out. What happens to fields that are not declared here is
decided in server/http/json_body.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.errors import InvalidParameter, UnknownParameter
from quire.params import SamplingParams
from quire.params.beam import LengthRule
from quire.params.kinds import RequestOutputKind
from quire.params.structured import RepetitionDetectionParams
from quire.server.http.json_body import PlainObject, objects_in
from quire.server.openai.hosted_tools import without_hosted
from quire.server.openai.prompt_forms import prompts_in
from quire.server.openai.sampling_fields import RequestSamplingFields
from quire.server.openai.structured import (
    SHAPE_FIELDS,
    StructuredFields,
    form_field,
    structured_outputs,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_PASSED_ON = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    "detokenize",
    *("bad_words", "allowed_token_ids", "logit_bias", "logprob_token_ids"),
    *("prompt_logprobs", "thinking_token_budget", "stream_interval"),
    "routed_experts_prompt_start",
)


_BAD_WORD_CHARS = 2**15
_LOGPROBS = 2**20
_LISTED = 21
EXTRA_ARGS = frozenset({"timeout_s"})
"""Keys of `vllm_xargs` that the engine itself reads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request. `completions`: prompts times n; `token_ids`: the ids of one list, of
    which more than the vocabulary has make no sense; `extra_args`: what `vllm_xargs` may have, None
    for anything, since logits processors of the operator read it.
    """

    max_model_len: int
    body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0
    completions: int = 128
    stop_strings: int = 16
    token_ids: int = 2**18
    reader_timeout_s: float = 120.0
    extra_args: frozenset[str] | None = EXTRA_ARGS

    @property
    def logprobs(self) -> int:
        """The most log-probabilities of a reply: 70 MB of JSON, and in any case those of one text
        of the model's length with the 20 likeliest tokens at each place.
        """
        return max(_LOGPROBS, self.max_model_len * _LISTED)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Parts of a stream in addition to its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionFields(msgspec.Struct, forbid_unknown_fields=True):
    """Repetition that ends the output."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class GenerationFields(RequestSamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share."""

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "session_id",
    )

    stream_options: StreamOptions | None = None

    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionFields | None = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    routed_experts_prompt_start: int | None = None

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    length_rule: LengthRule | None = None
    detokenize: bool | None = None
    data_parallel_rank: Annotated[int, Meta(ge=0, lt=2**16)] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None

    @property
    def num_drawn(self) -> int:
        """Number of completions generated for each prompt."""
        return 1 if self.n is None else self.n

    def field_of(self, parameter: str) -> str:
        first, _, kind = parameter.partition(".")
        given = [name for name in SHAPE_FIELDS if getattr(self, name) is not None]
        if first != "structured_outputs" or (len(given) > 1 and not kind):
            return parameter
        if self.structured_outputs is not None and given[0] != "response_format":
            return form_field(self.structured_outputs, kind)
        option = f"guided_{kind}"
        return option if option in given else next(iter(given), parameter)

    def check_amounts(self, limits: Limits, num_prompts: int = 1) -> None:
        """Raise InvalidParameter for more completions, stop strings or ids than a request may have,
        UnknownParameter for an extra argument that is not read. This is checked here because each
        of them costs work before the engine checks it.
        """
        if num_prompts * self.num_drawn > limits.completions:
            allowed = f"a request may have {limits.completions} completions in all"
            # the field that the client has set
            name = "n" if self.num_drawn == (self.n or 1) else "best_of"
            raise InvalidParameter(name, self.num_drawn, allowed)
        if isinstance(self.stop, list) and len(self.stop) > limits.stop_strings:
            allowed = f"a request may have {limits.stop_strings} stop strings"
            raise InvalidParameter("stop", len(self.stop), allowed)
        num_chars = sum(map(len, self.bad_words or ()))
        if num_chars > _BAD_WORD_CHARS:
            allowed = f"the words may have {_BAD_WORD_CHARS} characters in all"
            raise InvalidParameter("bad_words", num_chars, allowed)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if len(getattr(self, name) or ()) > limits.token_ids:
                allowed = f"the model has {limits.token_ids} tokens"
                raise InvalidParameter(name, len(getattr(self, name)), allowed)
        for name in self.vllm_xargs or ():
            if limits.extra_args is not None and name not in limits.extra_args:
                raise UnknownParameter(f"vllm_xargs.{name[:80]}", "no logits processor reads it")

    @property
    def num_prompt_copies(self) -> int:
        """Number of copies of the prompt's logprobs in the reply."""
        return 1

    def check_logprobs(
        self, limits: Limits, vocab_size: int, given: Iterable[tuple[int, SamplingParams]]
    ) -> None:
        """Raise InvalidParameter if the reply may have more logprobs than `limits` allow. `given`:
        the lengths of the prompts, and their parameters. An output whose length the request leaves
        open counts for nothing: most end long before the context does.
        """
        of_prompts = of_outputs = 0
        is_open = self.max_tokens is None and self.max_completion_tokens is None
        is_open = is_open and not self.use_beam_search
        for prompt_len, params in given:
            listed = 2 * self.num_drawn if self.use_beam_search else params.num_logprobs
            num_new = 0 if is_open else self.num_drawn * (params.max_tokens or 0)
            of_outputs += num_new * _num_listed(listed, vocab_size)
            num_old = self.num_prompt_copies * prompt_len
            of_prompts += num_old * _num_listed(params.prompt_logprobs, vocab_size)
        num = of_prompts + of_outputs
        if num > limits.logprobs:
            names = ["prompt_logprobs", "logprob_token_ids", "logprobs", "n"]
            # the larger share decides which field is named
            names = names if of_prompts > of_outputs else names[1:]
            name = next(name for name in names if getattr(self, name, None) is not None)
            allowed = f"a reply may have {limits.logprobs} log-probabilities, and this one {num}"
            hint = "Ask for fewer of them, send a smaller n or max_tokens, or a shorter prompt."
            raise InvalidParameter(name, getattr(self, name), allowed, hint)

    def refuse_unbuilt(self) -> None:
        """Raise NotBuiltYet for a documented field that this release does not implement."""
        for name in () if self.use_beam_search else ("length_penalty", "length_rule"):
            if getattr(self, name) is not None:
                allowed = "it goes with use_beam_search=true only"
                raise InvalidParameter(name, getattr(self, name), allowed)

    def check_stream(self) -> None:
        """Raise InvalidParameter for what does not go with a stream, or without one."""
        if not self.stream and self.stream_options is not None:
            given = msgspec.to_builtins(self.stream_options)
            raise InvalidParameter("stream_options", given, "it goes with stream=true only")
        if self.stream and self.prompt_logprobs is not None:
            allowed = "a stream has none"
            raise InvalidParameter("prompt_logprobs", self.prompt_logprobs, allowed)

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the engine's parameters: what the request gives, else `defaults`, else neutral.
        With `logprob_token_ids`, `logprobs` only says that there are some.

        Raises InvalidParameter.
        """
        fields = {**defaults, **self._given(_PASSED_ON)}
        num = 1 if self.use_beam_search else self.num_drawn
        logprobs = None if self.logprob_token_ids is not None else logprobs
        fields |= {"n": num, "max_tokens": max_tokens, "logprobs": logprobs}
        is_greedy = fields.get("temperature") == 0
        if fields.get("top_p") == 0 or (is_greedy and num > 1):
            # The engine knows one way to be greedy, with one completion. This is the same choice.
            fields |= {"top_k": 1, "top_p": 1.0, "min_p": 0.0}
            fields["temperature"] = 1.0 if is_greedy else fields.get("temperature", 1.0)
        if shape := self._given(SHAPE_FIELDS):
            fields["structured_outputs"] = structured_outputs(shape)
        if (found := self.repetition_detection) is not None:
            fields["repetition_detection"] = RepetitionDetectionParams(
                found.max_pattern_size, found.min_pattern_size, found.min_count
            )
        streamed = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        # a copy: the body is kept for the names in errors
        extra = dict(self.vllm_xargs or {})
        if self.timeout_s is not None:
            extra["timeout_s"] = self.timeout_s
        if self.kv_transfer_params:
            extra["kv_transfer_params"] = self.kv_transfer_params
        params = SamplingParams.from_optional(
            **{**fields, "output_kind": streamed, "extra_args": extra or None}
        )
        params.max_tokens = max_tokens
        return params

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    prompt: str | list[Any] | None = None
    prompt_embeds: str | list[str] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self, limit: int) -> list[str | list[int]]:
        """The prompts: a text, a list of texts, a list of ids, or a list of lists of ids. There may
        be none where `prompt_embeds` has some.
        """
        if self.prompt is None:
            if not self.num_embedded:
                allowed = "a request has a prompt, or prompt_embeds"
                raise InvalidParameter("prompt", None, allowed)
            given = []
        else:
            given = prompts_in("prompt", self.prompt)
        if (count := len(given) + self.num_embedded) > limit:
            name = "prompt" if given else "prompt_embeds"
            raise InvalidParameter(name, count, f"at most {limit} prompts in a request")
        return given

    @property
    def num_embedded(self) -> int:
        given = self.prompt_embeds
        return len(given) if isinstance(given, list) else int(given is not None)

    def check(self) -> None:
        """Raise InvalidParameter for what does not go together."""
        self.check_stream()
        self.refuse_unbuilt()
        if self.suffix:
            hint = "Leave it out: this model does not fill in the middle."
            raise InvalidParameter("suffix", self.suffix, "it must be empty", hint)
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise InvalidParameter(
                    "best_of", self.best_of, f"it must be n={self.n or 1} or more"
                )
            if self.stream and self.is_ranked:
                hint = "Leave out stream: which completions are best is known at the end."
                raise InvalidParameter("best_of", self.best_of, "a stream cannot have it", hint)

    def field_of(self, parameter: str) -> str:
        if parameter == "n" and self.best_of is not None:
            return "best_of"
        return "prompt" if parameter == "prompt_token_ids" else super().field_of(parameter)

    @property
    def num_drawn(self) -> int:
        return super().num_drawn if self.best_of is None else self.best_of

    @property
    def num_prompt_copies(self) -> int:
        """Copies of the prompt's logprobs in a reply: one a choice, as in vLLM's, and an echo's."""
        return (self.n or 1) * (2 if self.echo and self.logprobs is not None else 1)

    @property
    def is_ranked(self) -> bool:
        """Whether more completions are generated than the reply has."""
        return self.num_drawn > (self.n or 1)


_OF_MESSAGES = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "task"),
        *("reasoning_content", "thinking", "tools", "function_call"),
    }
)
_OF_PARTS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "signature", "name", "tool_name", "image_url"),
        *("input_audio", "file", "audio_url", "video_url", "detail", "uuid", "data"),
        "image_embeds",
    }
)
_OF_TOOLS = frozenset({"type", "function", "custom"})
_OF_CUSTOM_TOOLS = frozenset({"name", "description", "format"})
_OF_FUNCTIONS = frozenset({"name", "description", "parameters", "strict", "returns"})


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Literal["none", "auto"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

    def leave_out(self) -> list[str]:
        if self.tools:
            self.tools, places = without_hosted(self.tools, self.tool_choice)
            return places
        return []

    def objects(self) -> Iterator[PlainObject]:
        """The messages, their parts and the tools: see `FieldRules.settle`."""
        yield from objects_in("messages", self.messages, _OF_MESSAGES)
        for index, message in enumerate(self.messages):
            place = f"messages[{index}].content"
            yield from objects_in(place, message.get("content"), _OF_PARTS)
        for index, tool in enumerate(self.tools or ()):
            yield f"tools[{index}]", tool, _OF_TOOLS
            if isinstance(function := tool.get("function"), dict):
                yield f"tools[{index}].function", function, _OF_FUNCTIONS
            if isinstance(custom := tool.get("custom"), dict):
                yield f"tools[{index}].custom", custom, _OF_CUSTOM_TOOLS
        for index, function in enumerate(self.functions or ()):
            yield f"functions[{index}]", function, _OF_FUNCTIONS

    def check(self) -> None:
        """Raise InvalidParameter for what does not go together."""
        self.check_stream()
        self.refuse_unbuilt()
        if self.top_logprobs and not self.logprobs:
            allowed = "it goes with logprobs=true only"
            raise InvalidParameter("top_logprobs", self.top_logprobs, allowed)
        if self.logprob_token_ids is not None and not self.logprobs:
            allowed = "it goes with logprobs=true only"
            raise InvalidParameter("logprob_token_ids", self.logprob_token_ids, allowed)
        if self.continue_final_message and self.add_generation_prompt:
            hint = "Leave add_generation_prompt out, or send false."
            allowed = "an answer is either continued or begun"
            raise InvalidParameter("continue_final_message", True, allowed, hint)

    def field_of(self, parameter: str) -> str:
        if parameter == "logprobs":
            return "top_logprobs"
        if self.functions is not None and parameter.startswith("tools["):
            return parameter.replace("tools[", "functions[").replace(".function.", ".", 1)
        return super().field_of(parameter)

    @property
    def has_tools(self) -> bool:
        return any((self.tools, self.tool_choice, self.functions, self.function_call))

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the opening of a new answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported; None: no logprobs, or those of named tokens."""
        if self.logprob_token_ids is not None:
            return None
        return (self.top_logprobs or 0) if self.logprobs else None


def _num_listed(num: int | None, vocab_size: int) -> int:
    """Number of logprobs of a position with the `num` likeliest tokens (-1: all; None: none)."""
    return 0 if num is None else 1 + (vocab_size if num == -1 else num)
