"""The front end's half of a kind of output: what is kept of its parts, and how it joins outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.outputs import CompletionOutput
from quire.params import RequestOutputKind, SamplingParams
from quire.step.part import OutputPart
from quire.text.tokenizer import Tokenizer


class SharedOutput(Protocol):
    """The state that the completions of a request share."""

    output_kind: RequestOutputKind
    prompt_logprobs: object
    prompt_token_id_logprobs: object
    kv_transfer_params: Mapping[str, Any] | None


class KeptPart:
    """The parts of one kind that a completion got. An exception in one ends that request alone."""

    __slots__ = ()

    def add(self, part: Any) -> None:
        """Take in a part of the kind."""
        raise NotImplementedError

    def join(self, shared: SharedOutput) -> None:
        """An output is made: give it what belongs to the request."""

    def end(self, completion: CompletionOutput, num_tokens: int) -> None:
        """The completion has ended, with `num_tokens` tokens of prompt and output."""


@dataclass(frozen=True, slots=True)
class PartKind:
    """A kind that completions keep: `keep(params, prompt, tokenizer)` makes what holds its parts.
    `asked_by` is the sampling parameter that asks for it; None: every completion has it.
    """

    part: type[OutputPart]
    keep: Callable[[SamplingParams, Sequence[int], Tokenizer | None], KeptPart]
    asked_by: str | None = None
