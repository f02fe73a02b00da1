"""`SamplingParams`: the choice of tokens, the end of a request, and the content of its outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_type_hints

from quire.errors import InvalidParameter
from quire.params import checks, sampling_rules
from quire.params.kinds import SamplingType
from quire.params.pydantic_schema import PydanticField
from quire.params.sampling_fields import SamplingFields

MAX_BAD_WORD_SEQUENCES = 128
MAX_BAD_WORD_TOKENS = 1024
"""The most token sequences, and tokens in all, that the bad words of one request may become."""

_MUTABLE = (
    *("stop", "stop_token_ids", "logprob_token_ids", "structured_outputs", "logit_bias"),
    *("allowed_token_ids", "extra_args", "bad_words", "repetition_detection"),
    *("prompt_logprob_token_ids", "trace_decode_token_ids", "watermarking"),
    *("_all_stop_token_ids", "_bad_words_token_ids"),
)
_FLAT = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "_all_stop_token_ids")
"""Fields that are containers of plain values: a deep copy takes half a second for a million."""


class ModelBounds(Protocol):
    """The part of a model's config that parameters are checked against."""

    max_logprobs: int

    def get_vocab_size(self) -> int:
        """The number of ids."""
        ...


class TextEncoder(Protocol):
    """The part of a tokenizer that turns bad words into token ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """The token ids of `text`."""
        ...


class SamplingParams(SamplingFields, PydanticField, omit_defaults=True, tag="sampling"):
    """The parameters of one generation; checked when made, and again when a request is added.

    Assigning to a field is allowed and unchecked until then; `validate()` checks at once. Raises
    InvalidParameter, InvalidType (a TypeError) or UnknownParameter (a TypeError), all of them
    ValueErrors. The fields and their defaults are those of `SamplingFields`.
    """

    def __post_init__(self) -> None:
        self.validate()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Make one from fields of which None means the default, but for `max_tokens`, where None is
        as many as fit; clamps biases to [-100, 100].
        """
        given = {
            name: value
            for name, value in fields.items()
            if value is not None or name == "max_tokens"
        }
        if "logit_bias" in given:
            given["logit_bias"] = _clamped(given["logit_bias"])
        made: SamplingParams = cls(**given)
        return made

    @staticmethod
    def for_sampler_warmup() -> SamplingParams:
        """Make parameters that use every part of the sampler once."""
        return SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=50,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=2,
            logit_bias={0: -1.0, 1: 0.5},
            logprobs=5,
            prompt_logprobs=1,
        )

    def clone(self) -> SamplingParams:
        """Copy the parameters and their containers (with `skip_clone`, share the containers)."""
        twin = copy.copy(self)
        if not self.skip_clone:
            for name in _MUTABLE:
                value = getattr(self, name)
                if value is not None:
                    setattr(twin, name, _copied(name, value))
        return twin

    def validate(self) -> None:
        """Normalize every field, or raise for the first that is not allowed."""
        sampling_rules.check(self)

    def verify(
        self,
        model_config: ModelBounds,
        speculative_config: object = None,
        structured_outputs_config: object = None,
        tokenizer: object = None,
    ) -> None:
        """Raise InvalidParameter when a model cannot honour a field. The other arguments, which are
        documented, decide nothing: every field goes with drafts, and forms and words are checked by
        the engine that a request is added to.
        """
        vocab_size = model_config.get_vocab_size()
        self.check_for_model(vocab_size=vocab_size, max_logprobs=model_config.max_logprobs)

    def check_for_model(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Raise InvalidParameter when a model of this vocabulary cannot honour a field."""
        sampling_rules.verify(self, vocab_size=vocab_size, max_logprobs=max_logprobs)

    def limit_output(self, room: int) -> None:
        """Make `max_tokens` a number when the model has `room` tokens left after the prompt."""
        if self.max_tokens is None:
            self.max_tokens = room
            sampling_rules.check_min_tokens(self)

    def follow_trace(self, room: int) -> None:
        """Let a given output end only by its own end, `max_tokens` or the model's `room`."""
        if self.trace_decode_token_ids is None:
            return
        self.trace_decode_token_ids = self.trace_decode_token_ids[:room]
        num_tokens = len(self.trace_decode_token_ids)
        self.max_tokens = min(num_tokens, self.max_tokens or num_tokens)
        # whatever would end it or keep it from its end
        self.min_tokens, self.ignore_eos, self._eos_token_id = 0, True, None
        self.stop, self.stop_token_ids, self._all_stop_token_ids = [], [], set()

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Adopt the tokens that end a text of this model: its EOS token and further ones.

        After this `eos_token_id`, `stop_token_ids` and `all_stop_token_ids` are complete. With
        `ignore_eos` none of the model's ids stop the request; `all_stop_token_ids`, which
        `min_tokens` forbids, has them all the same.
        """
        listed = generation_config.get("eos_token_id")
        extra = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
        # the tokenizer's EOS is not a stop token: it ends an output without a stop reason
        extra = [token_id for token_id in extra if token_id != eos_token_id]
        stops = list(self.stop_token_ids or [])
        masked = {*stops, *extra} if eos_token_id is None else {*stops, *extra, eos_token_id}
        self._all_stop_token_ids = masked
        self._eos_token_id = None if self.ignore_eos else eos_token_id
        if not self.ignore_eos:
            self.stop_token_ids = checks.without_repeats([*stops, *extra])

    def update_from_tokenizer(self, tokenizer: TextEncoder) -> None:
        """Turn the bad words into token ids, each word as it is and with a leading space.

        The form with a space counts only if it begins with another token and has the same number of
        tokens.
        """
        self._bad_words_token_ids = None
        if not self.bad_words:
            return
        sequences: list[list[int]] = []
        for word in self.bad_words:
            sequences += _forms(word, tokenizer)
        num_tokens = sum(map(len, sequences))
        if len(sequences) > MAX_BAD_WORD_SEQUENCES or num_tokens > MAX_BAD_WORD_TOKENS:
            allowed = (
                f"with a leading space and without, the words may become {MAX_BAD_WORD_SEQUENCES} "
                f"sequences and {MAX_BAD_WORD_TOKENS} tokens, and these become {len(sequences)} "
                f"and {num_tokens}"
            )
            raise InvalidParameter("bad_words", self.bad_words, allowed)
        self._bad_words_token_ids = sequences

    @property
    def sampling_type(self) -> SamplingType:
        """Whether the draw is greedy, random, or random with a seed of its own."""
        if self.temperature < 1e-5:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends this request without a stop reason; None under `ignore_eos`."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Ids not to be drawn before `min_tokens`: the request's, and in an engine the model's."""
        return {*self._all_stop_token_ids, *(self.stop_token_ids or ())}

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """The bad words as token ids; None without bad words."""
        return self._bad_words_token_ids

    @property
    def num_logprobs(self) -> int | None:
        """Number of logprobs of a position in addition to its own: -1 all, None no logprobs."""
        if self.logprobs is None and self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are to be computed."""
        return sampling_rules.scores_prompt(self)

    def check_scored_rows(self, num_prompt_tokens: int) -> None:
        """Raise InvalidParameter unless each prompt token to be scored has a row of ids."""
        rows, start = self.prompt_logprob_token_ids, self.prompt_logprob_start or 0
        expected = max(0, num_prompt_tokens - 1 - start)
        if rows is not None and len(rows) != expected:
            allowed = (
                f"with the {num_prompt_tokens} tokens of this prompt and prompt_logprob_start="
                f"{start} it must have {expected} scored rows"
            )
            raise InvalidParameter("prompt_logprob_token_ids", f"<{len(rows)} rows>", allowed)

    @property
    def output_text_buffer_length(self) -> int:
        """Number of characters held back, because a stop string may begin in them."""
        if not self.stop or self.include_stop_str_in_output:
            return 0
        # one less than the longest: all of it would end the output
        return max(map(len, self.stop)) - 1


SamplingParams.__annotations__ = get_type_hints(SamplingFields)
"""Programs look there for what they may pass, and leave out the rest."""


def _copied(name: str, value: Any) -> Any:
    """A copy that shares nothing that can change."""
    if name in _FLAT and type(value) in (list, dict, set):
        return value.copy()
    return copy.deepcopy(value)


def _forms(word: str, tokenizer: TextEncoder) -> list[list[int]]:
    plain = list(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = list(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    if not plain:
        raise InvalidParameter("bad_words", word, "the tokenizer makes no token of it")
    checks.in_vocabulary("bad_words", plain + spaced, tokenizer.vocab_size)
    # vLLM's rule: another number of tokens means that the blank is a token of its own
    if len(spaced) == len(plain) and spaced[0] != plain[0]:
        return [plain, spaced]
    return [plain]


def _clamped(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        allowed = "it must be a dict from token id (or its digits) to number"
        raise InvalidParameter("logit_bias", bias, allowed)
    sampling_rules.check_num_biases(bias)
    ids = checks.token_ids("logit_bias", list(bias))
    return dict(zip(ids, map(_bounded, bias.values()), strict=True))


def _bounded(bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float) or bias != bias:
        raise InvalidParameter("logit_bias", bias, "each bias must be a number")
    return min(100.0, max(-100.0, bias))
