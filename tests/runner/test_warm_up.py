"""Warm-up runs the largest steps, leaves nothing behind, and changes no answer."""

from __future__ import annotations

import pytest

from quire import LogitsProcessor, SamplingParams
from quire.runner.sampling.custom import CustomProcessors
from quire.runner.warm_up import warm_up
from tests.runner.late_engines import Life, open_core


@pytest.mark.parametrize("late_seed", [None, 2])
@pytest.mark.parametrize("max_len", [1, 2, 48])
def test_the_largest_steps_run_and_leave_nothing(folder, late_seed, max_len):
    core, _ = open_core(folder)
    right = Life(3).run(core, disturbed=False)
    core.shutdown()
    core, _ = open_core(folder, late_seed=late_seed)
    runner, seen = core.executor.worker.model_runner, []
    forward = runner._forward

    class Watching:
        def __call__(self, batch, *, samples_all):
            seen.append((batch.num_tokens, samples_all))
            return forward(batch, samples_all=samples_all)

        logits = staticmethod(forward.logits)

    runner._forward = Watching()
    warm_up(runner, num_tokens=12, num_rows=5, max_len=max_len, max_logprobs=20)
    if max_len == 48:
        assert seen[0] == (12, False) and seen[1] == (5, True)
        assert {(size, True) for size in (1, 2, 4)} <= set(seen), "decodes of fewer rows"
        assert {(size + 2, False) for size in (1, 2, 4)} <= set(seen), "beside a prompt"
        assert (8, False) in seen, "prompts of fewer tokens than a step has"
    assert max(num_tokens for num_tokens, _ in seen) <= 12
    assert (runner.rows.handles == -1).all()
    found = Life(3).run(core, disturbed=False)
    assert found.tokens == right.tokens and found.ends == right.ends
    core.shutdown()


class Refuses(LogitsProcessor):
    """As somebody's code does with requests that it does not know."""

    def __init__(self):
        self.is_warm = False

    def is_argmax_invariant(self):
        return False

    def needs_host_ids(self, params):
        return False

    def update_state(self, batch_update):
        if not self.is_warm:
            raise KeyError("extra_args")

    def apply(self, logits):
        return logits


def test_a_logits_processor_that_knows_no_such_requests_does_not_stop_the_start(folder):
    core, _ = open_core(folder)
    right = Life(5).run(core, disturbed=False)
    core.shutdown()
    core, _ = open_core(folder, late_seed=1)
    runner, refuses = core.executor.worker.model_runner, Refuses()
    sampler = runner.heads.of(SamplingParams()).sampler
    sampler._custom = CustomProcessors([refuses])
    warm_up(runner, num_tokens=12, num_rows=5, max_len=48, max_logprobs=20)
    refuses.is_warm = True
    assert Life(5).run(core, disturbed=False).tokens == right.tokens
    core.shutdown()
