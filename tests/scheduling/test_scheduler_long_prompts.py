"""What a long prompt may take from those that decode: a configured number of tokens a step."""

import pytest

from quire.params import SamplingParams
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler
from quire.step.result import StepResult
from tests.support.simulation import invariants
from tests.support.simulation.scheduler_settings import scheduler_config

STREAMS, LONG, BUDGET = 32, 32_768, 2048


def scheduler_with_streams(**config):
    """32 requests that decode."""
    facts = scheduler_config(
        max_num_seqs=STREAMS + 4,
        max_num_batched_tokens=BUDGET,
        max_len=40_960,
        key_size=32,
        num_blocks=4000,
        **config,
    )
    scheduler = Scheduler(facts)
    for handle in range(STREAMS):
        add(scheduler, handle, [handle + 1] * 8, max_tokens=30_000)
    while len(step(scheduler).decode_rows) < STREAMS:
        continue
    return scheduler


def add(scheduler, handle, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    scheduler.add(Request(handle, prompt, params))


def step(scheduler):
    plan = scheduler.schedule(0.0)
    invariants.check_plan(scheduler, plan)
    scheduler.update(StepResult(plan.step_id, [5] * len(plan.sampled_rows)))
    return plan


@pytest.mark.parametrize(("threshold", "num_long"), [(0, 1), (256, 1), (100, 1), (256, 3)])
def test_decoding_goes_on_and_a_step_grows_by_what_is_configured(threshold, num_long):
    scheduler = scheduler_with_streams(long_prefill_token_threshold=threshold)
    for number in range(num_long):
        add(scheduler, 100 + number, [60 + number] * LONG, max_tokens=1)
    most = min(num_long * threshold or BUDGET, BUDGET - STREAMS)
    sizes = []
    while len(scheduler.requests) > STREAMS:
        plan = step(scheduler)
        assert len(plan.decode_rows) == STREAMS, "every stream has its token in every step"
        sizes.append(plan.num_tokens - STREAMS)
    assert max(sizes) <= most
    assert sum(sizes) == num_long * LONG
    # the bound is used: a prompt does not wait longer than it must
    assert len(sizes) <= -(-LONG // (min(threshold or BUDGET, BUDGET - STREAMS))) + num_long
