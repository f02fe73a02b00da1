"""The interface of custom logits processors, and the updates that they get."""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.step.faults import contained, processor_text

RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
)
"""(output_ids, logits [V]) -> logits [V], or (prompt_ids, output_ids, logits [V]) -> logits [V]."""

AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(index, parameters, prompt ids, output ids): the last list grows as the request does."""


class MoveDirectionality(enum.Enum):
    """Whether a move leaves its origin empty, or swaps origin and target."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


MovedRequest = tuple[int, int, MoveDirectionality]
"""(from index, to index, directionality)."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes since the last call, in the rows of the logits that `apply` will get. To be
    carried out in the order removed, added (which replaces the request at its index), moved (one
    after the other); an index may be as large as the larger of the old and the new batch.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Edits the logits of the whole batch, after penalties and bad words and before temperature.

    In each step `update_state`, then `apply`. If either raises, the step is run again in parts
    until the request for which it raises is alone, and that one fails. A processor whose rows are
    independent should rather be an `AdapterLogitsProcessor`.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request's parameters for this processor cannot be served."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Called once per engine; the first argument is the engine's plan."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the largest logit stays the largest, so that greedy requests can skip this."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the state to the rows of the next `apply`; None if nothing changed."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return edited logits, from and to fp32 [R, V]; may edit in place."""
        raise NotImplementedError

    def needs_host_ids(self, params: SamplingParams) -> bool:
        """Whether this request's output ids must be on the host before its next token is drawn.

        If so, it is not scheduled ahead of its own output. True unless overridden, because the
        lists given to `update_state` are always complete for such a request only.
        """
        return True


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs one callable per request; what a callable raises fails its request alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}
        self.errors: dict[int, str] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable of a request that enters the batch, or None if it needs none."""
        raise NotImplementedError

    def needs_host_ids(self, params: SamplingParams) -> bool:
        """Only for a request with a callable; if it cannot be made, the request fails later."""
        try:
            return self.new_req_logits_processor(params) is not None
        except BaseException as error:
            contained(error)
            return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep one bound callable per index."""
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: Tensor) -> Tensor:
        """Run every callable on its row, in place; `errors` then has the failures by index."""
        self.errors = {}
        for index in self.req_info:
            error = self.apply_to(index, logits, index)
            if error is not None:
                self.errors[index] = error
        return logits

    def apply_to(self, index: int, logits: Tensor, row: int) -> str | None:
        """Run the callable of the request at `index` on a row of logits, in place; returns why it
        failed.
        """
        try:
            logits[row] = _checked(self.req_info[index](logits[row]), logits[row])
        except BaseException as error:
            return processor_text(contained(error))
        return None

    def _bind(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        try:
            process = self.new_req_logits_processor(params)
            return None if process is None else _bound(process, prompt_ids or [], output_ids)
        except BaseException as error:
            return _raiser(contained(error))


def _bound(
    process: Callable[..., Tensor], prompt_ids: list[int], output_ids: list[int]
) -> Callable[[Tensor], Tensor]:
    num_arguments = len(inspect.signature(process).parameters)
    if num_arguments == 2:
        return lambda logits: process(output_ids, logits)
    if num_arguments == 3:
        return lambda logits: process(prompt_ids, output_ids, logits)
    raise TypeError(
        f"a request's logits processor takes (output_ids, logits) or (prompt_ids, output_ids, "
        f"logits), not {num_arguments} arguments"
    )


def _raiser(error: Exception) -> Callable[[Tensor], Tensor]:
    def fail(logits: Tensor) -> Tensor:
        raise error

    return fail


def _checked(result: Tensor, logits: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        raise TypeError(f"it must return logits of shape {tuple(logits.shape)}, not {result!r:.80}")
    return result


State = TypeVar("State")


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Apply a batch update to a dict from index to state; returns True if the dict may have
    changed. `new_state(params, prompt_ids, output_ids)` makes the state of an added request; None:
    no state.
    """
    if batch_update is None:
        return False
    had_entries = bool(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(index, None)
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            req_entries[index] = state
    for origin, target, directionality in batch_update.moved:
        _move(req_entries, origin, target, directionality)
    return had_entries or bool(req_entries)


def _move(
    entries: dict[int, State], origin: int, target: int, directionality: MoveDirectionality
) -> None:
    arriving = entries.pop(origin, None)
    leaving = entries.pop(target, None)
    if arriving is not None:
        entries[target] = arriving
    if leaving is not None and directionality is MoveDirectionality.SWAP:
        entries[origin] = leaving
