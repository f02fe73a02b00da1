"""Drafts of a network with layers of its own in the target's pool: a small model, EAGLE, EAGLE-3,
or the layers of a model that predict further tokens.

After each step of the target the network computes the same tokens: those of prompts, too, so that
its keys and values are in the same blocks as the target's wherever a request or a prefix hit reads
them. Then it guesses token after token, one pass for each. It draws as the target does, with the
request's parameters and the noise of the token that is guessed, so a network with the target's
logits guesses the target's tokens at every temperature. It writes nothing of the target's.

A network that reads hidden states computes position t from the token at t + 1. So the keys and
values of the last position of a cached prefix belong to the token that followed there when they
were computed: guesses right after a prefix hit may be worse, answers are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.runner.batch import BatchBuilder, StepInputs
from quire.runner.devices.device import Array, Device
from quire.runner.drafting.draft_rows import DraftRows
from quire.runner.drafting.drafter import VerifiedStep
from quire.runner.forward.forward import Forward
from quire.runner.rows import Rows
from quire.runner.sampling import Sampler
from quire.step.plan import Chunk, NewRow, StepPlan

_MOST_BEHIND = 64
"""Generated tokens of a row that no guesses are wanted of, which a network that reads ids alone
leaves for later: one pass for all of them costs much less than one in each step. Where they end a
request, a prefix hit finds nothing of the network's for them, and guesses after it may be worse.
"""


@dataclass(frozen=True, slots=True)
class Pass:
    """A way to run the network: what builds its batches, and what runs them."""

    batches: BatchBuilder
    forward: Forward


@dataclass(frozen=True, slots=True)
class NetworkInputs:
    """Inputs of a network's first pass: `lag` 1 and the target's states, those that enter
    layers where `takes_aux`; 0: ids alone.
    """

    lag: int = 0
    takes_aux: bool = False


class NetworkDrafter:
    """Drafts with one network for all rows."""

    def __init__(
        self,
        *,
        lengths: DraftRows,
        first: Pass,
        later: Pass,
        reads: NetworkInputs,
        sampler: Sampler,
        device: Device,
        max_len: int,
        window: int | None = None,
        token_ids: Tensor | None = None,
        is_greedy: bool = False,
    ) -> None:
        """`max_len`: no token at such a position or after it is guessed. `window`: of how many
        tokens before a step some layer has its keys and values, None: of all. token_ids [V'] int64:
        the target's ids of the network's, None: they are the same. is_greedy: the likeliest tokens
        are guessed at every temperature.
        """
        self._lengths = lengths
        self._first, self._later = first, later
        self._reads = reads
        self._sampler, self._device = sampler, device
        self._max_len = max_len
        self._window = window
        self._most_behind = _MOST_BEHIND if window is None else min(_MOST_BEHIND, window)
        self._token_ids = token_ids
        self._is_greedy = is_greedy
        self._active: list[int] = []

    def add_row(self, new: NewRow) -> None:
        self._lengths.begin(new)

    def remove_row(self, row: int) -> None:
        """Do nothing: the row's next request begins anew."""

    @torch.inference_mode()
    def propose(self, rows: Rows, step: VerifiedStep) -> list[int]:
        sampled = np.array(step.sampled, dtype=np.int64)
        counts = self._num_wanted(rows, sampled, np.array(step.limits, dtype=np.int64))
        fed = self._catch_up(rows, step, sampled[counts > 0])
        for done in range(1, int(counts.max(initial=0))):
            going_on = counts > done
            fed = self._go_on(rows, sampled[going_on], fed, going_on[counts >= done])
        return [int(count) for count in counts]

    def _num_wanted(self, rows: Rows, sampled: Array, limits: Array) -> Array:
        """Number of tokens to guess in each row [R]: those that its blocks have room for."""
        num_tokens = rows.num_tokens[sampled]
        room = rows.capacity(sampled) + 1 + self._reads.lag - num_tokens
        return np.minimum(np.minimum(room, self._max_len - num_tokens), limits).clip(0)

    def _catch_up(self, rows: Rows, step: VerifiedStep, guessing: Array) -> Tensor | None:
        """Compute the step's tokens, and the first guesses of some of its rows; returns the states
        that these rows' next pass reads.
        """
        lengths, computing = self._lengths, step.inputs.rows
        valid = valid_counts(step)
        ends = rows.num_computed[computing].copy()
        starts = ends - valid
        samples = np.isin(computing, guessing)
        if self._reads.lag:
            states = _states_of(step, self._reads, valid)
            lengths.begin_at(computing, starts, rows.num_tokens[computing])
            fed = self._run(rows, self._first, _plan(computing, ends - starts, samples), states)
            lengths.move_on(computing, ends - starts)
            return fed
        longest = step.drafts.max(initial=0) + 1  # a longer piece is of a request that is resumed
        is_decode = (starts >= rows.num_prompt[computing]) & (valid <= longest)
        ends[samples] += 1
        behind = lengths.num_computed[computing]
        if self._window is not None:  # the blocks of earlier tokens may be another request's by now
            behind = np.maximum(behind, starts - self._window + 1)
        starts = np.minimum(behind, ends - 1)
        chosen = samples | ~is_decode | (ends - starts >= self._most_behind)
        self._compute(rows, computing[chosen], starts[chosen], ends[chosen], samples[chosen])
        return None

    def _compute(
        self, rows: Rows, computing: Array, starts: Array, ends: Array, samples: Array
    ) -> None:
        """Compute rows from starts to ends, in several passes where one has too few places, and
        guess the next tokens of those that sample.
        """
        lengths, most = self._lengths, self._first.batches.capacity_batch.num_tokens
        lengths.begin_at(computing, starts, rows.num_tokens[computing])
        counts = ends - starts
        while counts.sum() > most:
            before = np.cumsum(counts - 1) - (counts - 1)
            some = np.clip(most - before, 0, counts - 1)
            taken = some > 0
            plan = _plan(computing[taken], some[taken], np.zeros(int(taken.sum()), dtype=bool))
            self._run(rows, self._first, plan, None)
            lengths.num_computed[computing] += some
            counts = counts - some
        if len(computing):
            self._run(rows, self._first, _plan(computing, counts, samples), None)
        lengths.move_on(computing, counts)

    def _go_on(self, rows: Rows, sampled: Array, fed: Tensor | None, kept: Array) -> Tensor | None:
        """Compute one token more of these rows, and guess the next one; `kept`: which of the pass
        before are among them.
        """
        if fed is not None and not kept.all():
            fed = fed.index_select(0, self._device.send(np.flatnonzero(kept)))
        if sampled.tolist() != self._active:
            self._active = sampled.tolist()  # the same list while rows stay, as their layout does
        fed = self._run(rows, self._later, StepPlan(0, [], [], [], self._active, []), fed)
        self._lengths.move_on(sampled, 1)
        return fed

    def _run(self, rows: Rows, way: Pass, plan: StepPlan, states: Tensor | None) -> Tensor | None:
        """Run a pass, and write its guesses into the rows; returns the states that the pass after
        it reads, of rows that sample.
        """
        inputs = way.batches.build(plan)
        if states is not None:
            assert inputs.batch.states is not None
            inputs.batch.states[: len(states)] = states
        way.batches.gather(inputs)
        hidden = way.forward(inputs.batch, samples_all=inputs.last is None)
        if not len(inputs.sampled):
            return None
        logits = way.forward.logits(hidden.last, inputs.last)[: len(inputs.sampled)]
        ids = self._guess(logits, inputs)
        rows.write(inputs.sampled_rows, inputs.sampled_at, ids)
        if not self._reads.lag:
            return None
        own = hidden.aux[0] if hidden.aux else hidden.last
        if inputs.last is None:
            return own[: len(inputs.sampled)]
        return own.index_select(0, inputs.last)

    def _guess(self, logits: Tensor, inputs: StepInputs) -> Tensor:
        return self._sampler.guess(
            *(logits, inputs.sampled, inputs.positions, self._token_ids),
            is_greedy=self._is_greedy,
        )


def valid_counts(step: VerifiedStep) -> Array:
    """Number of tokens of each row of the step [R] that are right: all but wrong drafts."""
    counts = step.inputs.counts.copy()
    accepted = np.array([len(new) for new in step.new_tokens], dtype=np.int64)
    places = {row: place for place, row in enumerate(step.inputs.rows.tolist())}
    counts[[places[row] for row in step.sampled]] -= step.drafts + 1 - accepted
    return counts


def _plan(rows: Array, counts: Array, samples: Array) -> StepPlan:
    """A step of so many tokens of each row, of which some sample."""
    if samples.all() and (counts == 1).all():
        return StepPlan(0, [], [], [], rows.tolist(), [])
    chunks = [
        Chunk(int(row), int(count), bool(guesses))
        for row, count, guesses in zip(rows, counts, samples, strict=True)
    ]
    return StepPlan(0, [], [], [], [], chunks)


def _states_of(step: VerifiedStep, reads: NetworkInputs, valid: Array) -> Tensor:
    """The target's states of a step's tokens, without those of wrong drafts."""
    found = torch.cat(step.states.aux, 1) if reads.takes_aux else step.states.last
    inputs = step.inputs
    places = np.concatenate(
        [np.arange(start, start + n) for start, n in zip(inputs.starts, valid, strict=False)]
    )
    if len(places) == len(found):
        return found
    return found.index_select(0, torch.from_numpy(places).to(found.device))
