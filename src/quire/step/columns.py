"""The output of a step on the host: the scheduler's result, and the columns that requests asked
for, which are sent to front ends as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np

from quire.step.part import OutputPart, VerifiedDrafts
from quire.step.result import StepResult

PAD_ID = -1


class LogprobColumns(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities (or logits, by the engine's `logprobs_mode`) of M tokens in W columns.

    `index[m]` is the token that entry m describes: its position in the flat `token_ids` of the
    result or of the outputs that carry these columns. Column 0 is the token itself with its
    `ranks[m]`; then the likeliest, largest first, or the requested ids in their order. `counts[m]`
    columns are valid; the others hold the id -1 and the value -inf.
    """

    index: list[int]
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    ranks: np.ndarray[Any, np.dtype[np.int32]]
    counts: list[int]

    def without(self, failed: Collection[int]) -> LogprobColumns | None:
        """The columns of all tokens but the failed ones; None if there are none left."""
        if not any(place in failed for place in self.index):
            return self
        return self.at({place: place for place in self.index if place not in failed})

    def at(self, places: Mapping[int, int]) -> LogprobColumns | None:
        """The columns of the tokens in `places`, renumbered as given there; None without any."""
        kept = [m for m, place in enumerate(self.index) if place in places]
        if not kept:
            return None
        return LogprobColumns(
            index=[places[self.index[m]] for m in kept],
            token_ids=self.token_ids[kept],
            values=self.values[kept],
            ranks=self.ranks[kept],
            counts=[self.counts[m] for m in kept],
        )


class PromptLogprobs(OutputPart):
    """The prompt's log-probabilities of one request: row i describes prompt token i + 1."""

    done_field = "prompt_logprobs_done"
    documented = "new_prompt_logprobs_tensors"

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    ranks: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def value(self) -> PromptLogprobs:
        return self

    @classmethod
    def of_value(cls, handle: int, value: PromptLogprobs) -> PromptLogprobs:
        return msgspec.structs.replace(value, handle=handle)


class PromptTokenScores(OutputPart):
    """The log-probabilities that a request asked for with `prompt_logprob_token_ids`: a row for
    each scored token of its prompt, -inf where the row has fewer ids.
    """

    done_field = "prompt_logprobs_done"
    documented = "prompt_token_id_logprobs"

    values: np.ndarray[Any, np.dtype[np.float32]]

    @property
    def value(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The scores [rows, ids]."""
        return self.values

    @classmethod
    def of_value(cls, handle: int, value: Any) -> PromptTokenScores:
        return cls(handle, np.asarray(value, np.float32))


class RoutedExperts(OutputPart):
    """The experts that tokens of one request were sent to, from position `first` on: values [n, L,
    k] for n tokens and L layers, 0 in layers without experts.
    """

    documented = "routed_experts"

    first: int
    values: np.ndarray[Any, np.dtype[np.int16]]

    @property
    def value(self) -> np.ndarray[Any, np.dtype[np.int16]]:
        """The experts, [n, L, k]."""
        return self.values

    @classmethod
    def of_value(cls, handle: int, value: Any) -> RoutedExperts:
        return cls(handle, 0, np.asarray(value, np.int16))


class PooledOutput(OutputPart):
    """The result of one pooling request: a vector [D], or a vector for each token [n, D]."""

    comes_at_end = True
    documented = "pooling_output"

    values: np.ndarray[Any, np.dtype[np.float32]]

    @property
    def value(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self.values

    @classmethod
    def of_value(cls, handle: int, value: Any) -> PooledOutput:
        return cls(handle, np.asarray(value, np.float32))


class TransferParams(OutputPart):
    """Words of the K/V connector about a request that has ended."""

    documented = "kv_transfer_params"

    params: dict[str, Any]

    @property
    def value(self) -> dict[str, Any]:
        return self.params

    @classmethod
    def of_value(cls, handle: int, value: Any) -> TransferParams:
        return cls(handle, dict(value))


AnyPart: TypeAlias = (
    PromptLogprobs
    | PromptTokenScores
    | RoutedExperts
    | PooledOutput
    | VerifiedDrafts
    | TransferParams
)
"""The kinds of parts that travel."""

DOCUMENTED_PARTS: dict[str, type[OutputPart]] = {
    kind.documented: kind for kind in get_args(AnyPart) if kind.documented is not None
}
"""Kinds by their fields of `EngineCoreOutput`."""


class RunnerOutput(msgspec.Struct, gc=False):
    """The output of a step: `result` for the rows that generate, and the parts of requests that
    have more than ids, such as pooled prompts. Errors of all are in `result`. `logprobs.index`
    indexes the ids of the result.
    """

    result: StepResult
    logprobs: LogprobColumns | None = None
    parts: list[AnyPart] = []


def join_columns(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """Concatenate the entries of all parts (not empty)."""
    width = max(part.token_ids.shape[1] for part in parts)
    return LogprobColumns(
        index=[place for part in parts for place in part.index],
        token_ids=np.concatenate([_widened(part.token_ids, width, PAD_ID) for part in parts]),
        values=np.concatenate([_widened(part.values, width, -np.inf) for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        counts=[count for part in parts for count in part.counts],
    )


def _widened(columns: np.ndarray[Any, Any], width: int, padding: float) -> np.ndarray[Any, Any]:
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=padding)
