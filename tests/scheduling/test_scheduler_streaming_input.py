"""A resumable request takes what comes with its next input: stop ids, length, an end."""

import pytest

from quire.params import SamplingParams
from quire.scheduling.request import Reason, Request, State
from quire.scheduling.scheduler import Scheduler
from quire.step.result import StepResult
from tests.support.simulation.scheduler_settings import scheduler_config


def make_scheduler():
    return Scheduler(
        scheduler_config(
            max_num_seqs=2, max_num_batched_tokens=64, max_len=32, key_size=4, num_blocks=20
        )
    )


def start(scheduler, prompt=(1, 2, 3), **params):
    request = Request(
        handle=0,
        prompt_token_ids=list(prompt),
        params=SamplingParams(ignore_eos=True, **params),
        resumable=True,
    )
    scheduler.add(request)
    return request


def run(scheduler, *token_ids):
    """Endings of steps that sample these ids, one each."""
    endings = []
    for token_id in token_ids:
        plan = scheduler.schedule()
        out = scheduler.update(StepResult(plan.step_id, [token_id]))
        endings += [(end.reason, end.stop_reason, end.message) for end in out.finished]
    return endings


def test_the_stop_ids_of_the_next_input_hold():
    scheduler = make_scheduler()
    request = start(scheduler, max_tokens=2, stop_token_ids=[8])
    assert run(scheduler, 5, 6) == []
    assert request.state is State.IDLE
    later = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[7])
    assert scheduler.extend(0, [4, 4], resumable=False, params=later) is None
    assert request.prompt_token_ids == [1, 2, 3, 5, 4, 4], "the newest token had no K/V"
    assert run(scheduler, 8, 5, 7) == [(Reason.STOP, 7, None)], "8 stops no more, 7 does"
    assert not scheduler.requests and len(scheduler.rows.stops) == 0


def test_it_ends_as_it_stopped_when_no_input_follows():
    scheduler = make_scheduler()
    start(scheduler, max_tokens=9, stop_token_ids=[8])
    assert run(scheduler, 5, 8) == []
    ending = scheduler.extend(0, [], resumable=False)
    assert (ending.reason, ending.stop_reason) == (Reason.STOP, 8)
    assert not scheduler.requests


@pytest.mark.parametrize(("num_more", "is_too_long"), [(28, False), (29, True)])
def test_input_fills_the_model_to_the_last_token(num_more, is_too_long):
    scheduler = make_scheduler()
    start(scheduler, max_tokens=1)
    assert run(scheduler, 5) == []
    ending = scheduler.extend(0, [4] * num_more, resumable=False)
    if is_too_long:
        assert ending.message == "the input grew beyond max_model_len"
    else:
        assert ending is None
        assert run(scheduler, 5) == [(Reason.LENGTH, None, None)]
    assert not scheduler.requests
