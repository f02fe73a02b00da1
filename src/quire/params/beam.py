"""The parameters of a beam search."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from quire.environment import max_sequences
from quire.errors import InvalidParameter, InvalidType
from quire.params import checks
from quire.params.checks import MAX_INT
from quire.params.structured import StructuredOutputsParams

LengthRule = Literal["sequence", "output"]
_RULES = " or ".join(f'"{rule}"' for rule in get_args(LengthRule))


class BeamSearchParams(msgspec.Struct, omit_defaults=True, metaclass=checks.CheckedMeta):
    """Parameters of `LLM.beam_search`, which searches for the likeliest texts.

    The score of a text is its summed logprob / length ** `length_penalty`. By the `length_rule`
    "sequence" the length is that of prompt and output without a trailing EOS; by "output" it is
    that of the output with its EOS, as in transformers.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: Any = None
    length_rule: LengthRule = "sequence"

    def __post_init__(self) -> None:
        most = max_sequences()
        allowed = f"it must be an int from 1 to {most}"
        self.beam_width = checks.integer("beam_width", self.beam_width, 1, most, allowed)
        allowed = "it must be an int of at least 1"
        self.max_tokens = checks.integer("max_tokens", self.max_tokens, 1, MAX_INT, allowed)
        allowed = "it must be a number from 0 to 2"
        self.temperature = checks.number("temperature", self.temperature, 0, 2, allowed)
        allowed = "it must be a number from -100 to 100"
        self.length_penalty = checks.number(
            "length_penalty", self.length_penalty, -100, 100, allowed
        )
        if self.length_rule not in get_args(LengthRule):
            raise InvalidParameter("length_rule", self.length_rule, f"it must be {_RULES}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            checks.flag(name, getattr(self, name))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            allowed = "it must be a StructuredOutputsParams"
            raise InvalidType("structured_outputs", self.structured_outputs, allowed)
