"""Log-probabilities of prompt tokens, gathered over a prompt's chunks and handed out with its first
output.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Send
from quire.runner.rows import Rows
from quire.runner.sampling import SampledLogprobs, Sampler
from quire.step.columns import PAD_ID, PromptLogprobs, PromptTokenScores
from quire.step.plan import NewRow

logger = logging.getLogger(__name__)

_MAX_LOGITS = 1 << 23
"""Logits computed at once (32 MiB): bounds what a request for prompt logprobs adds to a step."""


@dataclass(slots=True)
class _Pending:
    """The log-probabilities that a prompt asks for: the likeliest tokens at each place (`num_top`),
    the scores of `chosen` ids [rows, W] from the position `start` on (-1: none), or both.
    """

    num_top: int | None
    chosen: Tensor | None
    start: int
    pieces: dict[int, SampledLogprobs] = field(default_factory=dict)
    """Likeliest tokens by first position, so that a step that runs again replaces its earlier
    result.
    """
    scores: dict[int, Tensor] = field(default_factory=dict)
    """Scores of chosen ids by first position, as `pieces`."""


@dataclass(frozen=True, slots=True)
class PromptTensors:
    """`PromptLogprobs` that the device may still be computing."""

    handle: int
    token_ids: Tensor
    values: Tensor
    ranks: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.token_ids, self.values, self.ranks]

    def to_host(self, values: Sequence[Tensor]) -> PromptLogprobs:
        return PromptLogprobs(self.handle, *(value.numpy() for value in values))


@dataclass(frozen=True, slots=True)
class PromptScoreTensors:
    """`PromptTokenScores` that the device may still be computing."""

    handle: int
    scores: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.scores]

    def to_host(self, values: Sequence[Tensor]) -> PromptTokenScores:
        return PromptTokenScores(self.handle, values[0].numpy())


AnyPromptTensors: TypeAlias = PromptTensors | PromptScoreTensors


class PromptLogprobsPart:
    """A row part: the rows with prompt logprobs, and what has been computed of them.

    Entry i of a prompt describes token i + 1 given the tokens up to i, so it comes from the chunk
    that computes position i; the position before the first output has no entry.
    """

    def __init__(self, model: Any, sampler: Sampler, vocab_size: int, send: Send) -> None:
        self._model = model
        self._sampler = sampler
        self._send = send
        self._step = max(1, _MAX_LOGITS // vocab_size)
        self.pending: dict[int, _Pending] = {}

    def add_row(self, row: NewRow) -> None:
        assert isinstance(row.params, SamplingParams), "the head of rows that generate"
        params = row.params
        if not params.scores_prompt or row.prompt_logprobs_done:
            return
        chosen = params.prompt_logprob_token_ids
        ids = None if chosen is None else self._send(_table(chosen))
        start = params.prompt_logprob_start or 0
        self.pending[row.row] = _Pending(params.prompt_logprobs, ids, start)

    def remove_row(self, row: int) -> None:
        self.pending.pop(row, None)

    def collect(
        self, inputs: StepInputs, hidden: Tensor, rows: Rows
    ) -> tuple[dict[int, list[AnyPromptTensors]], dict[int, str]]:
        """Compute the logprobs of the step's prompt tokens. Returns, by row, the parts of prompts
        that are complete now, and error texts.

        Runs before the rows' counts move on to the end of the step, and again if the step does; a
        complete prompt is forgotten by `remove_row`.
        """
        done: dict[int, list[AnyPromptTensors]] = {}
        errors: dict[int, str] = {}
        for index, row in enumerate(inputs.rows.tolist()):
            pending = self.pending.get(row)
            if pending is None:
                continue
            try:
                found = self._collect_row(pending, inputs, index, hidden, rows)
            except Exception:
                logger.exception("the prompt logprobs of row %d failed", row)
                errors[row] = "the prompt's log-probabilities could not be computed"
            else:
                if found is not None:
                    done[row] = found
        return done, errors

    def _collect_row(
        self, pending: _Pending, inputs: StepInputs, index: int, hidden: Tensor, rows: Rows
    ) -> list[AnyPromptTensors] | None:
        row = int(inputs.rows[index])
        first, count = int(rows.num_computed[row]), int(inputs.counts[index])
        last = int(rows.num_prompt[row]) - 1
        tokens = rows.token_ids[row]
        described = min(count, last - first)
        start, slots = int(inputs.starts[index]), inputs.batch.adapter_slots
        own = None if slots is None else slots[start:]
        self._describe(pending, hidden[start:], own, tokens, first, described)
        if first + count <= last:
            return None
        return self._joined(pending, int(rows.handles[row]), hidden)

    def _describe(
        self,
        pending: _Pending,
        hidden: Tensor,
        slots: Tensor | None,
        ids: Tensor,
        first: int,
        count: int,
    ) -> None:
        """Compute positions first .. first+count-1, whose hidden states come first in `hidden`,
        and the slots of their adapter in `slots`.
        """
        unscored = max(0, pending.start - first)
        for start in range(0 if pending.num_top is not None else unscored, count, self._step):
            end = min(count, start + self._step)
            own = None if slots is None else slots[start:end]
            logits = self._model.logits(hidden[start:end], own)
            targets = ids[first + start + 1 : first + end + 1].long()
            if pending.num_top is not None:
                piece = self._sampler.prompt_logprobs(logits, targets, pending.num_top)
                pending.pieces[first + start] = piece
            skipped = max(0, unscored - start)
            if pending.chosen is not None and start + skipped < end:
                place = first + start + skipped - pending.start
                chosen = pending.chosen[place : place + end - start - skipped]
                pending.scores[place] = self._sampler.prompt_scores(
                    logits[skipped:], targets[skipped:], chosen
                )

    def _joined(self, pending: _Pending, handle: int, like: Tensor) -> list[AnyPromptTensors]:
        parts: list[AnyPromptTensors] = []
        if pending.num_top is not None:
            parts.append(self._positions(pending, handle, like))
        if pending.chosen is not None:
            scores = torch.cat(list(pending.scores.values()))
            parts.append(PromptScoreTensors(handle, scores))
        return parts

    def _positions(self, pending: _Pending, handle: int, like: Tensor) -> PromptTensors:
        pieces = list(pending.pieces.values())
        if not pieces:  # a prompt of one token
            none = like.new_empty((0, 1))
            return PromptTensors(handle, none.int(), none.float(), none[:, 0].int())
        return PromptTensors(
            handle,
            torch.cat([piece.token_ids for piece in pieces]),
            torch.cat([piece.values for piece in pieces]),
            torch.cat([piece.ranks for piece in pieces]),
        )


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of ids as an array [rows, W] int64, filled with PAD_ID."""
    table = np.full((len(rows), max(map(len, rows))), PAD_ID, dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
