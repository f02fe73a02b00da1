"""Outputs for the caller: a `RequestOutput` with its completions and their logprobs."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar, overload

import msgspec

from quire.lora.request import LoRARequest

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=type[msgspec.Struct])


def reads_as_dataclass(kind: Kind) -> Kind:
    """Let `dataclasses.asdict`, `astuple`, `fields` and `replace` take a struct, as programs do
    with results that are dataclasses elsewhere.
    """
    names = kind.__struct_fields__
    own = {"__doc__": kind.__doc__}  # without it one is made from a signature, which takes longer
    twin = dataclasses.make_dataclass(
        kind.__name__, names, namespace=own, init=False, repr=False, eq=False
    )
    kind.__dataclass_fields__ = twin.__dataclass_fields__  # type: ignore[attr-defined]
    return kind


Tokens: TypeAlias = dict[int, "Logprob"]
"""The reported tokens of one position: the chosen (or prompt) token first, then others."""


@reads_as_dataclass
class Logprob(msgspec.Struct, gc=False):
    """Log-probability of a token: natural logarithm, rank (1: the likeliest), text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(MutableSequence[Tokens | None]):
    """A list of positions kept as flat lists: long outputs do not make millions of objects.

    Reads like `list[dict[int, Logprob]]`; position i has the entries from `start_indices[i]` to
    `end_indices[i]`, none of them for the first position of a prompt, which reads as None. It only
    grows: assigning, deleting and inserting raise TypeError.
    """

    __slots__ = (
        "decoded_tokens",
        "end_indices",
        "logprobs",
        "ranks",
        "start_indices",
        "token_ids",
    )

    def __init__(self, positions: Iterable[Tokens | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(positions)

    def append(self, value: Tokens | None) -> None:
        """Add one position."""
        tokens = value or {}
        self.append_fast(
            list(tokens),
            [entry.logprob for entry in tokens.values()],
            [entry.rank for entry in tokens.values()],
            [entry.decoded_token for entry in tokens.values()],
        )

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position from its columns, which have equal lengths."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[Tokens | None]) -> None:
        """Add the positions of another list or of another FlatLogprobs."""
        if not isinstance(values, FlatLogprobs):
            for value in values:
                self.append(value)
            return
        base = len(self.token_ids)
        self.start_indices += [start + base for start in values.start_indices]
        self.end_indices += [end + base for end in values.end_indices]
        self.token_ids += values.token_ids
        self.logprobs += values.logprobs
        self.ranks += values.ranks
        self.decoded_tokens += values.decoded_tokens

    def __len__(self) -> int:
        return len(self.start_indices)

    def __iter__(self) -> Iterator[Tokens | None]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Tokens | None: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Tokens | None | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs(self[i] for i in range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        if not entries:
            return None
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in entries
        }

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (FlatLogprobs, list)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("FlatLogprobs only grows: positions cannot be assigned")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("FlatLogprobs only grows: positions cannot be deleted")

    def insert(self, index: int, value: Tokens | None) -> NoReturn:
        """Refused: a position can only be appended."""
        raise TypeError("FlatLogprobs only grows: positions cannot be inserted")


SampleLogprobs: TypeAlias = list[Tokens] | FlatLogprobs
"""One entry per output token."""
PromptLogprobs: TypeAlias = list[Tokens | None] | FlatLogprobs
"""One entry per prompt token, the first of which is None."""


class WeightVersionSpan(NamedTuple):
    """Tokens `start` to `end` - 1 of a completion, which were drawn with weights of a version."""

    start: int
    end: int
    version: str


@reads_as_dataclass
class CompletionOutput(msgspec.Struct, gc=False):
    """One completion of a request: all of it, or what is new, as the request's output kind says.

    `finish_reason` is "stop", "length", "abort", "error" or "repetition". `stop_reason` is the stop
    string or the stop token's id; None after EOS, length and abort. `error` says what went wrong
    when the reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    """`SampleLogprobs`, or None when none were asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    error: str | None = None
    routed_experts: Any = None
    """With `enable_return_routed_experts`, when the completion has ended: an array [n, L, k] int16
    of the experts that its tokens were sent to in each of L layers, from
    `routed_experts_prompt_start` to the token before the last, which the model has not read; 0 in
    layers without experts.
    """
    spec_decode_metrics: Any = None
    """With `per_request_spec_decode_metrics`, when the completion has ended: what became of its
    drafts, a `RequestSpecDecodeMetrics`.
    """
    weight_versions: list[WeightVersionSpan] | None = None
    """The versions of the weights that its tokens were drawn with; None: all are of those that the
    engine was started with.
    """

    @property
    def sampling_mask(self) -> None:
        """None: which tokens sampling left possible is not reported."""

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def append(self, new: CompletionOutput) -> None:
        """Take in a later delta of the same completion."""
        self.text += new.text
        self.token_ids = [*self.token_ids, *new.token_ids]
        if new.logprobs:
            merged = self.logprobs[:] if self.logprobs is not None else type(new.logprobs)()
            merged.extend(new.logprobs)
            self.logprobs = merged
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason
        self.error = new.error
        self.routed_experts = new.routed_experts
        self.spec_decode_metrics = new.spec_decode_metrics
        self.weight_versions = new.weight_versions


@reads_as_dataclass
class RequestStateStats(msgspec.Struct, gc=False):
    """Times of what happened, in seconds: `arrival_time` by the wall clock, `_ts` monotonic."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_preemptions: int = 0
    is_corrupted: bool = False
    """Whether NaN among its logits has ended it."""

    @property
    def is_watermarked(self) -> bool:
        """False: there are no watermarks."""
        return False

    @property
    def is_watermark_skipped(self) -> bool:
        """False: none was to be there."""
        return False


class _OpenMeta(msgspec.StructMeta):
    """Makes a Struct leave out keywords that it does not have, each with one warning: programs make
    outputs with the fields of other releases.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        for name in fields.keys() - set(cls.__struct_fields__):
            del fields[name]
            _warn_once(cls.__name__, name)
        return super().__call__(*args, **fields)


@functools.cache
def _warn_once(kind: str, name: str) -> None:
    logger.warning("%s has no field %s: it is left out.", kind, name)


class RequestOutput(msgspec.Struct, gc=False, metaclass=_OpenMeta):
    """The state of a request as its caller sees it; `request_id` is the id that the caller gave.

    `prompt_logprobs` has one entry per prompt token, the first None; DELTA outputs carry it once.
    `num_cached_tokens` is how much of the prompt came out of the prefix cache. `metrics` is there
    when statistics are on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: Any
    """`PromptLogprobs`, or None when none were asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    prompt_token_id_logprobs: Any = None
    """Log-probabilities of the ids of `prompt_logprob_token_ids`, an array [rows, ids] float32 with
    -inf where a row has fewer; DELTA outputs carry it once.
    """

    @property
    def num_cache_creation_tokens(self) -> None:
        """None: how much of the prompt was new to the prefix cache is not counted."""

    @property
    def ec_transfer_params(self) -> None:
        """None: encoders' outputs are not sent to other engines."""

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in a later output of the same request.

        Completions with the same index are joined when `aggregate` (both are deltas), else
        replaced; others are added.
        """
        self.finished = self.finished or next_output.finished
        if next_output.prompt_logprobs is not None:
            self.prompt_logprobs = next_output.prompt_logprobs
        if next_output.prompt_token_id_logprobs is not None:
            self.prompt_token_id_logprobs = next_output.prompt_token_id_logprobs
        if next_output.num_cached_tokens is not None:
            self.num_cached_tokens = next_output.num_cached_tokens
        self.metrics = next_output.metrics or self.metrics
        self.kv_transfer_params = next_output.kv_transfer_params or self.kv_transfer_params
        at = {completion.index: place for place, completion in enumerate(self.outputs)}
        for completion in next_output.outputs:
            place = at.get(completion.index)
            if place is None:
                self.outputs.append(completion)
            elif aggregate:
                self.outputs[place].append(completion)
            else:
                self.outputs[place] = completion


make_request_output: Callable[..., RequestOutput] = functools.partial(
    msgspec.StructMeta.__call__, RequestOutput
)
"""Makes one of fields that are known to be its own, without the check of `_OpenMeta`."""
