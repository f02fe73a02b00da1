"""Stages over the hash model: every stage reads the ids that the last one has drawn, however many
steps are in flight; and planted bugs that show.
"""

from collections import Counter, deque

import numpy as np
import pytest

from quire.executor import stages
from quire.executor.stages import StagedExecutor, StagedStep
from quire.executor.token_outbox import TokenOutbox
from quire.runner.rows import Rows
from quire.runner.runner import Step
from tests.support.simulation.staged import StagedTrace, run_staged

NUM_TRACES = 600
PART = 200


@pytest.mark.parametrize("first", range(0, NUM_TRACES, PART))
def test_every_request_gets_its_text(first):
    run_staged(first, PART)


def test_the_traces_meet_what_they_are_for():
    met = Counter()
    for seed in range(300):
        trace = StagedTrace(seed)
        trace.run()
        met["four stages"] += trace.num_stages == 4
        met["ids of rows that changed hands"] += trace.num_reused
        met["accepted drafts"] += trace.num_accepted
        preemptions = trace.scheduler.counters.num_preemptions
        met["preemptions"] += preemptions
        met["preemptions at depth 4"] += preemptions * (trace.depth == 4)
        met["aborted at depth 4"] += (trace.depth == 4) * sum(
            e.is_cut for e in trace.expected.values()
        )
    assert all(count >= 5 for count in met.values()) and len(met) == 6, met


# Planted bugs


def give_ids_to_whoever_has_the_row(monkeypatch):
    real = Rows.follow

    def follow(self, *given):
        self._changed_at[:] = -1
        real(self, *given)

    monkeypatch.setattr(Rows, "follow", follow)


def give_no_ids_to_a_row_that_has_just_begun(monkeypatch):
    real = Rows.follow

    def follow(self, *given):
        self._changed_at += 1
        real(self, *given)
        self._changed_at -= 1

    monkeypatch.setattr(Rows, "follow", follow)


def lose_what_comes_with_a_launch(monkeypatch):
    real = TokenOutbox.take
    monkeypatch.setattr(TokenOutbox, "take", lambda self, rank: real(self, rank)[1:])


def lose_the_drafts(monkeypatch):
    real = Rows.write_drafts
    monkeypatch.setattr(Rows, "write_drafts", lambda self, row, ids: real(self, row, ids[:1]))


def count_wrong_drafts(monkeypatch):
    monkeypatch.setattr(
        Rows,
        "advance_verified",
        lambda self, rows, counts, sampled, drafts, accepted: self.advance(
            rows, counts, sampled, accepted
        ),
    )


def advance_sampled_rows_at_once(monkeypatch):
    real = Step.advance_unsampled

    def advance(self):
        rows, inputs = self._runner.rows, self._inputs
        real(self)
        rows.num_computed[np.unique(inputs.sampled)] += 1

    monkeypatch.setattr(Step, "advance_unsampled", advance)


def begin_before_the_ids_are_drawn(monkeypatch):
    monkeypatch.setattr(StagedExecutor, "needs_host_ids", lambda self, params: False)
    monkeypatch.setattr(StagedStep, "comes_before", lambda self, rows: False)


def read_the_newest_step_first(monkeypatch):
    class Backwards(deque):
        def append(self, step):
            self.appendleft(step)

    monkeypatch.setattr(stages, "deque", Backwards)


BUGS = [
    give_ids_to_whoever_has_the_row,
    give_no_ids_to_a_row_that_has_just_begun,
    lose_what_comes_with_a_launch,
    lose_the_drafts,
    count_wrong_drafts,
    advance_sampled_rows_at_once,
    begin_before_the_ids_are_drawn,
    read_the_newest_step_first,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_staged(0, 300)


def test_steps_wait_for_ids_that_a_scheduler_did_not_wait_for(monkeypatch):
    """Requests that are scheduled ahead cost the overlap and nothing else."""
    monkeypatch.setattr(StagedExecutor, "needs_host_ids", lambda self, params: False)
    run_staged(0, 150)
