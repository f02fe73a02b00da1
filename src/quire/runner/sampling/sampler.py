"""The sampler: logits of the rows that get a token in, token ids and log-probabilities out.

Order: grammar mask (into the raw logits, so that every mode of logprobs sees it), the parts of
`logits_parts`, custom processors, then one op: temperature, min-p, top-k, top-p, draw. Everything
is computed in place; a row is copied only if its raw log-probabilities are requested and something
edits it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from torch import Tensor

from quire.ops import Ops
from quire.ops.sampling.noise import noise_keys, token_hashes
from quire.params import SamplingParams
from quire.params.sampling_fields import SamplingFields
from quire.params.structured import NO_TOKEN_LEFT
from quire.runner.devices.device import Device, Send, Stage
from quire.runner.sampling.allowed_ids import AllowedIds
from quire.runner.sampling.bad_words import BadWords
from quire.runner.sampling.batch_update import Member
from quire.runner.sampling.columns import SampledLogprobs, SampledTokens
from quire.runner.sampling.custom import CustomProcessors
from quire.runner.sampling.logit_bias import LogitBias
from quire.runner.sampling.logits_processor import LogitsProcessor
from quire.runner.sampling.logprobs import (
    Described,
    LogprobRequest,
    LogprobsMode,
    describe,
    describe_sampled,
)
from quire.runner.sampling.min_tokens import MinTokens
from quire.runner.sampling.part import Edit, EditedRow, LogitsPart, TokenHistory
from quire.runner.sampling.penalties import TokenPenalties
from quire.runner.sampling.sent_mask import SentMask
from quire.runner.sampling.traced import Traced

logger = logging.getLogger(__name__)


_NEUTRAL = {field.name: field.default for field in msgspec.structs.fields(SamplingFields)}


def logits_parts(ops: Ops, history: TokenHistory, vocab_size: int, send: Send) -> list[LogitsPart]:
    """Make the features that edit logits before temperature, in their order."""
    return [
        AllowedIds(ops, vocab_size, send),
        LogitBias(ops, send),
        MinTokens(ops, send),
        TokenPenalties(ops, history, send),
        BadWords(ops, history, send),
        Traced(),
    ]


@dataclass(frozen=True, slots=True)
class _RowState:
    """A row's sampling state besides its settings."""

    is_greedy: bool
    logprobs: LogprobRequest | None
    parts: tuple[LogitsPart, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit is all that the row needs."""
        return self.is_greedy and self.logprobs is None and not self.parts


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """The inputs of a step's draws besides the logits, on the device: settings [M, 4] fp64 (see
    `ops.draw`) and keys [M, 2] int32 of the noise. `edits` run first, one after the other; they are
    for the rows at the indices `edited`.
    """

    settings: Tensor
    keys: Tensor
    edits: Sequence[Edit]
    edited: frozenset[int]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a step: `counts` [R] of the rows that sample; `ids` [M] on the device, those at
    the positions of the M = R + drafts tokens that are drawn (a row's last is meaningless).
    """

    counts: np.ndarray
    ids: Tensor

    def by_row(self) -> list[list[int]]:
        """Return each row's drafts, which the device may have to be waited for."""
        ids, ends = self.ids.tolist(), np.cumsum(self.counts + 1).tolist()
        return [
            ids[end - 1 - n : end - 1] for n, end in zip(self.counts.tolist(), ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The queued results of a step: ids [R] int64, the largest logit [R] fp32 of each row, and the
    requested log-probabilities. `errors` by index: those already known; `nans`: how many of a row's
    logits are NaN, as far as that is known without waiting.

    The largest logits show which rows have no token, so nothing here waits for the device:
    `tensors` can be copied to the host at any time, and `to_host` interprets them.
    """

    token_ids: Tensor
    peaks: Tensor
    logprobs: SampledLogprobs | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    nans: Mapping[int, int] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        described = [] if self.logprobs is None else self.logprobs.tensors
        return [self.token_ids, self.peaks, *described]

    def to_host(self, values: Sequence[Tensor]) -> SampledTokens:
        token_ids, peaks, *described = values
        errors = _errors_of(peaks)
        nans = {i: self.nans.get(i, 1) for i in errors if math.isnan(peaks[i])}  # 1 at least
        errors |= self.errors
        columns = None
        if self.logprobs is not None:
            columns = self.logprobs.to_host(described).without(errors)
        return SampledTokens(token_ids, columns, errors, nans)


class Sampler:
    """Draws the next token of each row that gets one.

    Rows are the runner's; a request's sampling state is made from its parameters and its history
    alone, so a resumed request continues with the tokens it would have had. `sample` may be called
    again with the same logits, computed again; everything that depends on the sampled ids happens
    in `commit`. `inputs` and `sample` do not wait for the device.
    """

    def __init__(
        self,
        *,
        ops: Ops,
        num_rows: int,
        vocab_size: int,
        device: Device,
        history: TokenHistory,
        max_logprobs: int,
        logprobs_mode: LogprobsMode,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._send, self._known = device.send, device.known
        self._max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self._mode = logprobs_mode
        self._reports_raw = logprobs_mode.startswith("raw")
        self._is_normalized = logprobs_mode.endswith("logprobs")
        self._hashes = token_hashes(vocab_size, device.torch)
        self._parts = logits_parts(ops, history, vocab_size, device.send)
        self._custom = CustomProcessors(logits_processors) if logits_processors else None
        self._states: dict[int, _RowState] = {}
        self._seeds = np.zeros(num_rows, dtype=np.uint64)
        self._settings = np.zeros((num_rows, 4))
        self._num_special = 0

    def needs_host_ids(self, params: SamplingParams) -> bool:
        """Whether a request must not be scheduled ahead, since a processor reads its output ids."""
        return self._custom is not None and self._custom.needs_host_ids(params)

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts can be verified: not where a custom processor edits all rows at once,
        which cannot be asked about tokens that may not come.
        """
        return self._custom is None or self._custom.take_drafts

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """Add a request in `row`, which is free; with output if it is resumed. If this raises, the
        row stays free.
        """
        assert row not in self._states, f"row {row} is taken"
        logprobs = None
        if params.logprobs is not None or params.logprob_token_ids is not None:
            logprobs = LogprobRequest.of(params, self._vocab_size, self._send)
        assert logprobs is None or logprobs.num_top <= self._max_logprobs
        # the parts come first, since they may raise: what follows cannot
        parts = self._add_parts(row, params, len(prompt_token_ids))
        state = _RowState(params.temperature == 0.0, logprobs, parts)
        if self._custom is not None:
            self._custom.add(row, params, prompt_token_ids, output_token_ids)
        self._seeds[row] = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._settings[row] = (params.temperature, params.top_k, params.top_p, params.min_p)
        self._states[row] = state
        # a count, so that a step of plain rows asks no row what it needs
        self._num_special += not state.is_plain

    def remove(self, row: int) -> None:
        """Remove the request in `row`: finished, aborted or preempted."""
        state = self._states.pop(row)
        self._num_special -= not state.is_plain
        for part in state.parts:
            part.remove(row)
        if self._custom is not None:
            self._custom.remove(row)

    def inputs(self, rows: np.ndarray, positions: np.ndarray, stage: Stage) -> DrawInputs | None:
        """Make the inputs of `sample` for these rows, sent to the device by `stage`; None if every
        row takes the largest logit.
        """
        if self._takes_largest_alone:
            return None
        keys = noise_keys(self._seeds[rows], positions)
        wanting = self._wanting(rows, positions)
        # made on the host while the model runs, and applied when its logits are there
        edits = [part.edit(places, stage) for part, places in wanting]
        edited = frozenset(place.index for _, places in wanting for place in places)
        return DrawInputs(stage(self._settings[rows]), stage(keys), edits, edited)

    def sample(
        self,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        mask: SentMask | None = None,
        inputs: DrawInputs | None = None,
        drafts: Drafts | None = None,
    ) -> SamplerOutput:
        """Draw one token per row of logits [R, V] fp32; rows, positions [R] integers.

        positions are the indices, in prompt and output, of the tokens to be drawn. `mask` is the
        grammar's. `inputs` None: they are made now. `drafts` are those of the step; a row occurs
        once more for each. The logits are edited in place. A row without a finite largest logit, or
        whose own processor fails, has an error in the output; the others are not affected. Raises
        ProcessorFailure if a processor for the whole batch fails.
        """
        # first, so that every mode of log-probabilities sees what the grammar allows
        if mask is not None:
            self._ops.mask_logits(logits, mask.places, mask.bits)
        if self._takes_largest_alone:
            token_ids, peaks = self._ops.greedy(logits)
            return SamplerOutput(token_ids, peaks, nans=self._count_nans(logits, peaks))
        if inputs is None:
            inputs = self.inputs(rows, positions, self._send)
            assert inputs is not None, "some row is not greedy"
        return self._sample_rows(logits, rows, inputs, drafts)

    def guess(
        self,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        token_ids: Tensor | None = None,
        *,
        is_greedy: bool = False,
    ) -> Tensor:
        """Draw the ids [R] int64 that `sample` would draw if it had these logits, those of a draft
        network: with the rows' settings, noise and edits, but without a grammar and custom
        processors. A row without a finite logit has the first id. is_greedy: take the largest
        logits instead.

        logits [R, V'] fp32 are those of `token_ids` [V'] ascending (None: of all). They are edited
        in place.
        """
        hashes = self._hashes
        if self._num_special == 0:
            ids = self._ops.greedy(logits)[0]
            return ids if token_ids is None else token_ids[ids]
        if token_ids is not None:
            hashes = hashes[token_ids]
        wanting = self._wanting(rows, positions)
        if wanting and token_ids is not None:
            # edits name ids of the whole vocabulary, and the draft network may have a part of it
            whole = logits.new_full((len(logits), self._vocab_size), -math.inf)
            logits = whole.index_copy_(1, token_ids, logits)
            hashes, token_ids = self._hashes, None
        for part, places in wanting:
            part.edit(places, self._send)(logits)
        if is_greedy:
            ids = self._ops.greedy(logits)[0]
        else:
            keys = self._send(noise_keys(self._seeds[rows], positions))
            ids = self._ops.draw(logits, self._send(self._settings[rows]), keys, hashes)[0]
        return ids if token_ids is None else token_ids[ids]

    def members(self, rows: np.ndarray) -> list[Member]:
        """Return the members in these rows for `commit`; by then the rows may have new requests."""
        return [] if self._custom is None else self._custom.members(rows.tolist())

    def commit(
        self,
        sampled: SampledTokens,
        members: Sequence[Member],
        places: Iterable[int] | None = None,
    ) -> None:
        """Append the tokens of a step that succeeded to `members`; `places`: those that count
        (None: all). A member whose token cannot be kept gets an entry in `sampled.errors`; this
        does not raise.
        """
        if not members:
            return
        for index in range(len(members)) if places is None else places:
            member = members[index]
            if index not in sampled.errors:
                try:
                    member.output_ids.append(int(sampled.token_ids[index]))
                except Exception:
                    logger.exception("failed to record the sampled token at index %d", index)
                    sampled.errors[index] = "the sampled token could not be kept"

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> SampledLogprobs:
        """Log-probabilities of prompt tokens.

        targets [n] are the tokens, logits [n, V] fp32 those of the positions before them.
        Nothing edits them, so that raw and processed values are the same. k: how many of the
        likeliest tokens in addition, -1 all. n > 0.
        """
        request = LogprobRequest(self._vocab_size if k == -1 else k)
        index = list(range(len(logits)))
        piece = Described(0, logits, request)
        return describe(self._ops, [piece], index, targets, normalize=self._is_normalized)

    def prompt_scores(self, logits: Tensor, targets: Tensor, token_ids: Tensor) -> Tensor:
        """Log-probabilities [n, W] of chosen ids [n, W] int64 at places in a prompt, -inf for those
        below 0. `logits` and `targets` are those of `prompt_logprobs`.
        """
        piece = Described(0, logits, LogprobRequest(0, token_ids.clamp_min(0)))
        index = list(range(len(logits)))
        found = describe(self._ops, [piece], index, targets, normalize=self._is_normalized)
        return found.values[:, 1:].masked_fill(token_ids < 0, -math.inf)

    def _add_parts(
        self, row: int, params: SamplingParams, num_prompt_tokens: int
    ) -> tuple[LogitsPart, ...]:
        added: list[LogitsPart] = []
        try:
            for part in self._parts:
                if _asks(params, part) and part.add(row, params, num_prompt_tokens):
                    added.append(part)
        except BaseException:
            for part in added:
                part.remove(row)
            raise
        return tuple(added)

    def _wanting(
        self, rows: np.ndarray, positions: np.ndarray
    ) -> list[tuple[LogitsPart, list[EditedRow]]]:
        """Return the parts that edit something in a step, in order, and the rows they edit."""
        wanted: dict[int, list[EditedRow]] = {}
        for index, (row, position) in enumerate(
            zip(rows.tolist(), positions.tolist(), strict=True)
        ):
            for part in self._states[row].parts:
                if part.wants(row, position):
                    wanted.setdefault(id(part), []).append(EditedRow(index, row, position))
        return [(part, wanted[id(part)]) for part in self._parts if id(part) in wanted]

    def _custom_must_run(self, *, is_all_greedy: bool) -> bool:
        return self._custom is not None and self._custom.must_run(is_all_greedy=is_all_greedy)

    @property
    def _takes_largest_alone(self) -> bool:
        """Whether a step needs only the largest logit of each row."""
        return self._num_special == 0 and not self._custom_must_run(is_all_greedy=True)

    def _sample_rows(
        self, logits: Tensor, rows: np.ndarray, inputs: DrawInputs, drafts: Drafts | None
    ) -> SamplerOutput:
        states = [self._states[row] for row in rows.tolist()]
        asking = [i for i, state in enumerate(states) if state.logprobs is not None]
        logits, raw, errors = self._edit(logits, states, rows, inputs, drafts)
        settings = inputs.settings
        token_ids, peaks = self._ops.draw(logits, settings, inputs.keys, self._hashes)
        if errors:
            # a row that failed must not hand a meaningless id to a head that reads it before the
            # host knows
            token_ids.index_fill_(0, self._sent(list(errors)), 0)
            asking = [i for i in asking if i not in errors]
        logprobs = self._logprobs(states, asking, logits, raw, settings, token_ids)
        return SamplerOutput(token_ids, peaks, logprobs, errors, self._count_nans(logits, peaks))

    def _count_nans(self, logits: Tensor, peaks: Tensor) -> dict[int, int]:
        """Number of NaN among the logits of the rows that have some. On a device that computes
        later nothing is counted: to read all logits of all steps once more is too much for it.
        """
        known = self._known(peaks)
        if known is None or not np.isnan(values := known.numpy()).any():
            return {}
        rows = np.flatnonzero(np.isnan(values)).tolist()
        return {row: int(logits[row].isnan().sum()) for row in rows}

    def _edit(
        self,
        logits: Tensor,
        states: list[_RowState],
        rows: np.ndarray,
        inputs: DrawInputs,
        drafts: Drafts | None,
    ) -> tuple[Tensor, dict[int, Tensor], dict[int, str]]:
        """Run parts and custom processors -> logits [R, V], the raw values of edited rows that are
        requested, and errors by index.
        """
        must_run = self._custom_must_run(is_all_greedy=all(map(self._takes_largest, states)))
        edited = range(len(states)) if must_run else inputs.edited
        kept = (i for i in edited if states[i].logprobs is not None)
        raw = {i: logits[i].clone() for i in kept} if self._reports_raw else {}
        for edit in inputs.edits:
            edit(logits)
        if not must_run:
            return logits, raw, {}
        assert self._custom is not None, "only they must run"
        if drafts is None:
            logits, errors = self._custom.apply(logits, rows.tolist())
        else:
            own = rows[np.cumsum(drafts.counts + 1) - 1].tolist()
            logits, errors = self._custom.apply_to_drafts(logits, own, drafts.by_row())
        return logits, raw, errors

    def _logprobs(
        self,
        states: list[_RowState],
        asking: list[int],
        logits: Tensor,
        raw: dict[int, Tensor],
        settings: Tensor,
        token_ids: Tensor,
    ) -> SampledLogprobs | None:
        asked = [(i, request) for i in asking if (request := states[i].logprobs) is not None]
        if not asked:
            return None
        at = self._sent([i for i, _ in asked])
        if not self._reports_raw:
            settings = settings.index_select(0, at)
        own = token_ids.index_select(0, at)
        return describe_sampled(self._ops, self._mode, asked, logits, raw, settings, own)

    def _sent(self, indices: list[int]) -> Tensor:
        return self._send(np.array(indices, dtype=np.int64))

    def _takes_largest(self, state: _RowState) -> bool:
        """Whether edits that keep the largest logit do not change this row's result."""
        return state.is_greedy and (self._reports_raw or state.logprobs is None)


def _asks(params: SamplingParams, part: LogitsPart) -> bool:
    """Whether a request sets one of the part's parameters to other than its neutral value."""
    values = ((name, getattr(params, name)) for name in part.parameters)
    return any(value and value != _NEUTRAL[name] for name, value in values)


def _errors_of(peaks: Tensor) -> dict[int, str]:
    found = peaks.tolist()
    if math.isfinite(sum(found)):  # false for every peak that is not finite
        return {}
    return {i: _what_is_wrong(x) for i, x in enumerate(found) if not math.isfinite(x)}


def _what_is_wrong(peak: float) -> str:
    if peak == -math.inf:
        return NO_TOKEN_LEFT
    return (
        "the model's logits are not finite (NaN or infinity), so no token can be drawn: its "
        "weights hold such values, or they are too large for its dtype"
    )
