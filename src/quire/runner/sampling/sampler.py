"""The sampler: logits of the rows that get a token in, token ids and log-probabilities out.

Order: grammar mask (into the raw logits, so that every mode of logprobs sees it), the parts of
`logits_parts`, custom processors, temperature, min-p, top-k, top-p, draw. A row is copied only if a
part edits it, and computed from itself alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.ops import Ops
from quire.ops.noise import noise_keys, token_hashes
from quire.ops.sample import greedy
from quire.ops.vocab_row import VocabRow
from quire.params import SamplingParams
from quire.runner.grammar_mask import GrammarMask
from quire.runner.sampling.allowed_ids import AllowedIds
from quire.runner.sampling.bad_words import BadWords
from quire.runner.sampling.columns import (
    LogprobColumns,
    LogprobEntry,
    SamplerOutput,
    to_columns,
)
from quire.runner.sampling.custom import CustomProcessors
from quire.runner.sampling.logit_bias import LogitBias
from quire.runner.sampling.logits_processor import LogitsProcessor
from quire.runner.sampling.logprobs import LogprobRequest, LogprobsMode, describe_token
from quire.runner.sampling.min_tokens import MinTokens
from quire.runner.sampling.part import LogitsPart, TokenHistory
from quire.runner.sampling.penalties import TokenPenalties
from quire.runner.sampling.picking import (
    Choice,
    Pick,
    Way,
    pick_alone,
    pick_largest,
    pick_unfiltered,
)

logger = logging.getLogger(__name__)

_ENTRIES_TOGETHER = 2**17
"""How many logits are worked on at once: half a MiB stays in a core's cache."""


def logits_parts(history: TokenHistory, vocab_size: int, device: torch.device) -> list[LogitsPart]:
    """The features that edit logits before temperature, in the order in which they do."""
    return [
        AllowedIds(device),
        LogitBias(device),
        MinTokens(device),
        TokenPenalties(history, vocab_size, device),
        BadWords(history, device),
    ]


@dataclass(frozen=True, slots=True)
class _RowState:
    choice: Choice
    parts: tuple[LogitsPart, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit is all that the row needs."""
        return self.choice.way is Way.LARGEST and not self.parts


class Sampler:
    """Draws the next token of each row that gets one.

    Rows are the runner's; a request's sampling state is made from its parameters and its history
    alone, so a resumed request continues with the tokens it would have had. `sample` changes
    nothing that a second call would see; what depends on the sampled ids happens in `commit`.
    """

    def __init__(
        self,
        *,
        ops: Ops,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        history: TokenHistory,
        max_logprobs: int,
        logprobs_mode: LogprobsMode,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self._mode = logprobs_mode
        self._hashes = token_hashes(vocab_size, device)
        self._parts = logits_parts(history, vocab_size, device)
        self._custom = CustomProcessors(logits_processors)
        self._states: dict[int, _RowState] = {}
        self._seeds = np.zeros(num_rows, dtype=np.uint64)
        self._num_special = 0
        self._rows_together = max(1, _ENTRIES_TOGETHER // vocab_size)

    def needs_host_ids(self, params: SamplingParams) -> bool:
        """Whether a request must not be scheduled ahead: a processor looks at its output ids."""
        return self._custom.needs_host_ids(params)

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """A request enters `row`, which is free; with output if it is resumed.

        If this raises, the row is still free.
        """
        assert row not in self._states, f"row {row} is taken"
        choice = Choice.of(params, self._vocab_size, self._device)
        assert choice.logprobs is None or choice.logprobs.num_top <= self._max_logprobs
        state = _RowState(choice, self._add_parts(row, params, len(prompt_token_ids)))
        self._custom.add(row, params, prompt_token_ids, output_token_ids)
        self._seeds[row] = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._states[row] = state
        self._num_special += not state.is_plain

    def remove(self, row: int) -> None:
        """The request in `row` leaves, for good or preempted."""
        state = self._states.pop(row)
        self._num_special -= not state.is_plain
        for part in state.parts:
            part.remove(row)
        self._custom.remove(row)

    def sample(
        self,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        mask: GrammarMask | None = None,
    ) -> SamplerOutput:
        """Draw one token per row of logits [R, V] fp32; rows, positions [R] integers.

        positions are the indices, in prompt and output, of the tokens to be drawn. `mask` is
        applied to `logits` in place, the only change that is made to them. A row without a finite
        largest logit, or whose own processor fails, is an entry of `errors`; the others do not
        notice. Raises ProcessorFailure where one for the whole batch fails.
        """
        if mask is not None:
            places = torch.tensor(mask.places, device=self._device)
            self._ops.mask_logits(logits, places, torch.from_numpy(mask.bits).to(self._device))
        if self._num_special == 0 and not self._custom.must_run(is_all_greedy=True):
            token_ids, peaks = greedy(logits)
            errors = _errors_of(peaks.tolist())
            for index in errors:
                token_ids[index] = 0
            return SamplerOutput(token_ids, None, errors)
        return self._sample_rows(logits, rows, positions)

    def commit(self, output: SamplerOutput, rows: np.ndarray) -> None:
        """The step succeeded: these are the rows' next tokens. A row that cannot take its token
        becomes an entry of `output.errors`; this does not raise.
        """
        if not self._custom:
            return
        for index, (row, token_id) in enumerate(
            zip(rows.tolist(), output.token_ids.tolist(), strict=True)
        ):
            if index not in output.errors:
                try:
                    self._custom.append(row, token_id)
                except Exception:
                    logger.exception("the sampled token of row %d was not kept", row)
                    output.errors[index] = "the sampled token could not be kept"

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> LogprobColumns:
        """Log-probabilities of prompt tokens.

        targets [n] are the tokens, logits [n, V] fp32 those of the positions before them.
        Log-softmax values in every mode. k: how many of the likeliest tokens beside it, -1 all.
        Works row by row; n > 0.
        """
        request = LogprobRequest(self._vocab_size if k == -1 else k)
        entries = {
            i: describe_token(VocabRow(logits[i]), target, request, normalize=True)
            for i, target in enumerate(targets.tolist())
        }
        return to_columns(entries)

    def _add_parts(
        self, row: int, params: SamplingParams, num_prompt_tokens: int
    ) -> tuple[LogitsPart, ...]:
        added: list[LogitsPart] = []
        try:
            for part in self._parts:
                if part.add(row, params, num_prompt_tokens):
                    added.append(part)
        except BaseException:
            for part in added:
                part.remove(row)
            raise
        return tuple(added)

    def _sample_rows(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> SamplerOutput:
        places = list(zip(rows.tolist(), positions.tolist(), strict=True))
        edited, errors = self._edit_batch(logits, places)
        keys = torch.from_numpy(noise_keys(self._seeds[rows], positions)).to(self._device)
        token_ids = [0] * len(places)
        entries: dict[int, LogprobEntry] = {}
        for way, group in self._groups(places, errors):
            raw = [logits[i] for i in group]
            if edited is None:
                values = [self._edit(x, *places[i]) for x, i in zip(raw, group, strict=True)]
            else:
                values = [edited[i] for i in group]
            choices = [self._states[places[i][0]].choice for i in group]
            for i, pick in zip(
                group, self._pick(way, choices, raw, values, keys[group]), strict=True
            ):
                if not math.isfinite(pick.peak):
                    errors[i] = _what_is_wrong(pick.peak)
                    continue
                token_ids[i] = pick.token_id
                if pick.entry is not None:
                    entries[i] = pick.entry
        logprobs = to_columns(dict(sorted(entries.items()))) if entries else None
        return SamplerOutput(torch.tensor(token_ids, device=self._device), logprobs, errors)

    def _groups(
        self, places: list[tuple[int, int]], errors: dict[int, str]
    ) -> Iterator[tuple[Way, list[int]]]:
        """The indices that are still to be sampled, as many together as fit the cache."""
        by_way: dict[Way, list[int]] = {way: [] for way in Way}
        for i, (row, _) in enumerate(places):
            if i not in errors:
                by_way[self._states[row].choice.way].append(i)
        for way, members in by_way.items():
            size = 1 if way is Way.ALONE else self._rows_together
            for start in range(0, len(members), size):
                yield way, members[start : start + size]

    def _pick(
        self,
        way: Way,
        choices: list[Choice],
        raw: list[Tensor],
        values: list[Tensor],
        keys: Tensor,
    ) -> list[Pick]:
        if way is Way.LARGEST:
            return pick_largest(values)
        if way is Way.UNFILTERED:
            temperatures = [choice.temperature for choice in choices]
            return pick_unfiltered(values, temperatures, self._hashes, keys)
        return [pick_alone(choices[0], raw[0], values[0], self._hashes, keys[0], self._mode)]

    def _edit_batch(
        self, logits: Tensor, places: list[tuple[int, int]]
    ) -> tuple[Tensor | None, dict[int, str]]:
        """All rows edited by parts and custom processors; None if no processor must run."""
        is_all_greedy = all(self._takes_largest(self._states[row]) for row, _ in places)
        if not self._custom.must_run(is_all_greedy=is_all_greedy):
            return None, {}
        edited = logits.clone()
        for values, (row, position) in zip(edited, places, strict=True):
            self._apply_parts(values, row, position)
        return self._custom.apply(edited, [row for row, _ in places])

    def _edit(self, raw: Tensor, row: int, position: int) -> Tensor:
        """The row edited by its parts: a copy, or `raw` itself if no part wants it."""
        if not any(part.wants(row, position) for part in self._states[row].parts):
            return raw
        edited = raw.clone()
        self._apply_parts(edited, row, position)
        return edited

    def _apply_parts(self, values: Tensor, row: int, position: int) -> None:
        for part in self._states[row].parts:
            if part.wants(row, position):
                part.apply(values, row, position)

    def _takes_largest(self, state: _RowState) -> bool:
        """Whether edits that keep the largest logit cannot be noticed in this row."""
        reports_edits = self._mode.startswith("processed") and state.choice.logprobs is not None
        return state.choice.temperature == 0.0 and not reports_edits


def _errors_of(peaks: list[float]) -> dict[int, str]:
    return {i: _what_is_wrong(peak) for i, peak in enumerate(peaks) if not math.isfinite(peak)}


def _what_is_wrong(peak: float) -> str:
    if peak == -math.inf:
        return "no token can be drawn: the request's parameters and grammar forbid every one"
    return "the model's logits are not finite (NaN or infinity), so no token can be drawn"
