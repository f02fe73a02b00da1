"""The core's loop over a model without tensors: order, overlap, requests that cannot run."""

import pytest

from quire.engine.control_verbs import perform
from quire.engine.wire.output_parts import FinishReason
from tests.engine.core.core_over_hashes import drain, expected, make_core, request
from tests.support import invariants


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host_ids", [False, True], ids=["ids-on-device", "ids-on-host"])
def test_every_request_gets_its_tokens(depth, host_ids):
    core = make_core(depth=depth, host_ids=host_ids)
    for handle in range(9):
        core.add_request(request(handle, length=3 + handle, max_tokens=1 + handle))
    tokens, ends = drain(core)
    assert {h: e.reason for h, e in ends.items()} == dict.fromkeys(range(9), FinishReason.LENGTH)
    for handle in range(9):
        assert tokens[handle] == expected(handle, 3 + handle, 1 + handle)


def test_a_second_step_is_launched_before_the_first_is_read():
    core = make_core(depth=2)
    core.add_request(request(0))
    core.step()
    assert core.executor.num_launched == 2
    plain = make_core(depth=1)
    plain.add_request(request(0))
    plain.step()
    assert plain.executor.num_launched == 1


def test_outputs_tell_when_a_request_was_queued_scheduled_and_preempted():
    core = make_core(num_blocks=10, max_model_len=40)
    now = iter(range(1, 1000))
    core._clock = lambda: float(next(now))
    for handle in range(3):
        core.add_request(request(handle, length=9, max_tokens=14))
    events = {handle: [] for handle in range(3)}
    while core.has_work:
        outputs = core.step()
        assert outputs.timestamp > 0 and outputs.scheduler_stats is outputs.stats
        ended = {output.request_id for output in outputs.outputs if output.finished}
        assert (outputs.finished_requests or set()) == ended
        for output in outputs.outputs:
            events[int(output.request_id)] += output.events
    kinds = {handle: [event.type.name for event in found] for handle, found in events.items()}
    assert all(found[:2] == ["QUEUED", "SCHEDULED"] for found in kinds.values())
    assert "PREEMPTED" in kinds[2] and "PREEMPTED" not in kinds[0]
    for found in events.values():
        times = [event.timestamp for event in found]
        assert times == sorted(times) and times[0] > 0


def test_a_request_that_can_never_run_ends_alone():
    core = make_core(num_blocks=6)
    core.add_request(request(0, length=30, max_tokens=9))
    core.add_request(request(1))
    tokens, ends = drain(core)
    assert ends[0].reason is FinishReason.ERROR
    assert "KV blocks" in ends[0].message
    assert tokens == {1: expected(1)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("index", range(12))
def test_an_abort_at_any_step_is_final(depth, index):
    core = make_core(depth=depth)
    core.add_request(request(0))
    core.add_request(request(1))
    tokens = {0: [], 1: []}
    steps = 0
    while core.has_work:
        if steps == index:
            core.abort_requests([0, 0, 99])
        out = core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            assert handle != 0 or steps < index
            tokens[handle].append(token)
        steps += 1
    invariants.check_idle(core.scheduler)
    assert tokens[1] == expected(1)
    assert tokens[0] == expected(0)[: len(tokens[0])]


def test_a_resumed_request_goes_on_behind_its_emitted_tokens():
    core = make_core()
    whole = expected(0)
    resumed = request(0)
    resumed.output_token_ids = whole[:4]
    core.add_request(resumed)
    tokens, ends = drain(core)
    assert tokens[0] == whole[4:]
    assert ends[0].reason is FinishReason.LENGTH


def test_nothing_runs_while_paused():
    core = make_core()
    core.add_request(request(0))
    perform(core, "pause_scheduler", ())
    assert not core.has_work
    assert core.step().handles == []
    perform(core, "resume_scheduler", ())
    tokens, _ = drain(core)
    assert tokens[0] == expected(0)


def test_the_prefix_cache_is_reset_only_when_free_or_told_to():
    core = make_core()
    core.add_request(request(0, length=9))
    first = list(core.step().token_ids)
    assert perform(core, "reset_prefix_cache", ()) is False
    assert perform(core, "reset_prefix_cache", (True,)) is True
    tokens, _ = drain(core)
    assert first + tokens[0] == expected(0, 9)
    assert core.scheduler.counters.num_preemptions == 1


def test_a_repeated_prompt_is_reported_as_cached():
    core = make_core()
    core.add_request(request(0, length=9))
    drain(core)
    core.add_request(request(1, length=9))
    started = [start for _ in range(3) for start in core.step().started]
    assert [(s.handle, s.num_cached_tokens) for s in started] == [(1, 8)]
