"""The bodies of completion and chat completion requests, and what may stand in them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.errors import InvalidParameter
from quire.server.openai.fields import GenerationFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenIds = list[Annotated[int, Meta(ge=0, lt=2**31)]]


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self, limit: int) -> list[str | list[int]]:
        """The prompts: a text, a list of texts, a list of ids, or a list of lists of ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(type(item) is int for item in given):
            return [given]
        if not given or not (_all_texts(given) or _all_ids(given)):
            allowed = "it must be a string, token ids, or a list of such"
            raise InvalidParameter("prompt", given, allowed)
        if len(given) > limit:
            raise InvalidParameter("prompt", len(given), f"at most {limit} prompts in a request")
        return given

    def check(self) -> None:
        """Raise InvalidParameter for what does not go together."""
        self.check_stream()
        self.refuse_unbuilt()
        if self.suffix:
            hint = "Leave it out: this model does not fill in the middle."
            raise InvalidParameter("suffix", self.suffix, "it must be empty", hint)
        if self.best_of not in (None, self.n or 1):
            hint = "Leave it out and choose among n completions yourself."
            raise InvalidParameter("best_of", self.best_of, "it must be n", hint)


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

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
        if self.tools is not None and not self.tools:
            raise InvalidParameter("tools", [], "it must not be empty", "Leave it out.")

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the opening of a new answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported: None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _all_texts(items: list[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def _all_ids(items: list[Any]) -> bool:
    return all(
        isinstance(item, list) and item and all(type(token) is int for token in item)
        for item in items
    )
