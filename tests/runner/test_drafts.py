"""Drafts, right and wrong ones, change nothing of what a request gets but in how many steps."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from quire import SamplingParams
from quire.engine.core.core import EngineCore
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.pace import FixedPace
from quire.runner.drafting.verification import kept_places, num_accepted
from quire.scheduling.scheduler import Scheduler
from tests.runner.drafting.watched_core import assert_same
from tests.runner.late_engines import Life, open_core

NUM_DRAFTS = 3


class Prompter:
    """Drafts from the right answers, each token right with a given chance."""

    def __init__(self, answers, chance, seed):
        self.answers = answers
        self.chance = chance
        self.random = random.Random(seed)
        self.num_right = 0

    def add_row(self, new):
        pass

    def remove_row(self, row):
        pass

    def propose(self, rows, step):
        return [self._propose(rows, row) for row in step.sampled]

    def _propose(self, rows, row):
        answer = self.answers.get(int(rows.handles[row]), [])
        done = int(rows.num_tokens[row] - rows.num_prompt[row])
        right = answer[done : done + self.random.randint(0, NUM_DRAFTS)]
        drafts = [t if self.random.random() < self.chance else 250 for t in right]
        rows.write_drafts(row, drafts)
        return len(drafts)


def core_with_drafts(folder, drafter, **wishes):
    """A core whose scheduler plans drafts, which `drafter` makes."""
    plain, _ = open_core(folder, **wishes)
    config = msgspec.structs.replace(plain.scheduler.config, num_drafts=NUM_DRAFTS)
    plain.executor.worker.model_runner.heads.of(SamplingParams()).drafting = Drafting(
        drafter, FixedPace(NUM_DRAFTS)
    )
    return EngineCore(Scheduler(config), plain.executor, depth=2 if "late_seed" in wishes else 1)


def serve(core, life, *, disturbed=False):
    steps = []
    launch = core.executor.launch
    core.executor.launch = lambda plan: (steps.append(plan), launch(plan))[1]
    found = life.run(core, disturbed=disturbed)
    core.shutdown()
    return found, steps


@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_answers_are_those_without_drafts(folder, seed, chance):
    life = Life(seed)
    plain, _ = open_core(folder)
    right, steps = serve(plain, life)
    drafter = Prompter(right.tokens, chance, seed)
    found, fewer = serve(core_with_drafts(folder, drafter), life, disturbed=seed % 2 == 1)
    assert any(plan.decode_drafts for plan in fewer)
    assert_same(found, right, life)
    if chance == 1.0 and seed % 2 == 0:
        assert len(fewer) < len(steps), "right drafts save steps"


@pytest.mark.parametrize("seed", range(6))
def test_with_two_steps_in_flight_on_a_late_device_too(folder, seed):
    life = Life(seed)
    plain, _ = open_core(folder, late_seed=seed)
    right, _ = serve(plain, life)
    drafter = Prompter(right.tokens, 0.7, seed)
    found, _ = serve(core_with_drafts(folder, drafter, late_seed=seed), life)
    for handle in set(range(life.num_requests)) - set(life.aborted):
        assert found.tokens.get(handle) == right.tokens.get(handle)
        assert found.ends.get(handle) == right.ends.get(handle)


@pytest.mark.parametrize(
    ("sampled", "guesses", "drafts", "accepted"),
    [
        ([5, 6, 7], [5, 6, 0], [2], [3]),
        ([5, 6, 7], [5, 9, 0], [2], [2]),
        ([5, 6, 7], [9, 6, 0], [2], [1]),
        ([5, 6, 7], [5, 9, 0], [1, 0], [2, 1]),
        ([5, 6, 7], [5, 6, 7], [0, 0, 0], [1, 1, 1]),
        ([], [], [], []),
    ],
)
def test_a_draft_counts_where_it_is_the_token_that_was_drawn(sampled, guesses, drafts, accepted):
    drafts = np.array(drafts, dtype=np.int64)
    found = num_accepted(np.array(sampled), np.array(guesses), drafts)
    assert found.tolist() == accepted
    assert len(kept_places(found, drafts)) == sum(accepted)


def test_the_places_of_accepted_tokens_are_in_order():
    places = kept_places(np.array([2, 1, 3]), np.array([2, 1, 2]))
    assert places.tolist() == [0, 1, 3, 5, 6, 7]
