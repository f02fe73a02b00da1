"""The core's loop over a model without tensors: order, overlap, requests that cannot run."""

import pytest

from quire.engine import EngineCoreRequest
from quire.engine.control_verbs import perform
from quire.engine.wire.output_parts import FinishReason
from quire.errors import InvalidParameter, InvalidType
from quire.params import SamplingParams
from tests.engine.core.core_over_hashes import drain, expected, make_core, request
from tests.support.simulation import invariants


@pytest.mark.parametrize("depth", [1, 2, 4])
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
    core = make_core(num_blocks=10, max_len=40)
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
            events[int(output.request_id)] += output.events or []
    kinds = {handle: [event.type.name for event in found] for handle, found in events.items()}
    assert all(found[:2] == ["QUEUED", "SCHEDULED"] for found in kinds.values())
    assert "PREEMPTED" in kinds[2] and "PREEMPTED" not in kinds[0]
    for found in events.values():
        times = [event.timestamp for event in found]
        assert times == sorted(times) and times[0] > 0


def direct(name, length, seed=3, **fields):
    """A request by the documented fields, which have no handle."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, seed=seed)
    ids = list(range(1, length + 1))
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=ids, sampling_params=params, **fields
    )


def drain_by_name(core):
    """{name: ids} of all outputs, and the names that `finished_requests` gave, in order."""
    tokens, finished = {}, []
    while core.has_work:
        outputs = core.step()
        finished += sorted(outputs.finished_requests or ())
        for output in outputs.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens, finished


def test_requests_given_straight_to_a_core_are_told_apart():
    core = make_core()
    given = [direct("a", 6), direct("b", 9), direct("a", 4)]
    for one in given:
        core.add_request(one)
    core.add_request(request(0, length=5))
    assert {one.handle for one in given} == {-1}, "the caller's objects are not changed"
    assert len(core.scheduler.requests) == 4
    core.add_request(direct("c", 8))
    core.abort_requests(["c", "unknown"])
    tokens, finished = drain_by_name(core)
    first, second, third = (expected(3, length) for length in (6, 9, 4))
    assert tokens.keys() == {"0", "a", "b"}
    assert (tokens["0"], tokens["b"]) == (expected(0, 5), second)
    assert sorted(tokens["a"]) == sorted(first + third)
    assert set(finished) == {"0", "a", "b"}
    assert not core._direct.names


def test_a_seed_of_the_parameters_is_the_seed_of_a_direct_request():
    core = make_core()
    for seed in (5, 6):
        core.add_request(direct(f"{seed}", 6, seed=seed))
    tokens, _ = drain_by_name(core)
    assert tokens == {"5": expected(5, 6), "6": expected(6, 6)}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"arrival_time": "x"}, InvalidType, "arrival_time='x' .* a number"),
        ({"arrival_time": float("nan")}, InvalidParameter, "arrival_time=nan"),
        ({"priority": True}, InvalidType, "priority=True"),
        ({"data_parallel_rank": 0.0}, InvalidType, "data_parallel_rank=0.0"),
        ({"cache_salt": b"x"}, InvalidType, "cache_salt"),
        ({"n": 2}, InvalidParameter, "n=2 .* to the engine"),
        ({"max_tokens": None}, InvalidParameter, "max_tokens=None .* to the engine"),
    ],
    ids=str,
)
@pytest.mark.parametrize("handle", [-1, 7])
def test_a_core_refuses_what_is_not_of_its_type_and_goes_on(fields, error, text, handle):
    core = make_core(policy="priority")
    core.add_request(request(0))
    bad = direct("bad", 6)
    bad.handle = handle
    for name, value in fields.items():
        setattr(bad.params if name in ("n", "max_tokens") else bad, name, value)
    if handle < 0 or error is InvalidType or "arrival_time" in fields:
        with pytest.raises(error, match=text):
            core.add_request(bad)
    core.add_request(request(1))
    tokens, ends = drain(core)
    assert tokens[0] == expected(0) and tokens[1] == expected(1)
    assert ends[0].reason is ends[1].reason is FinishReason.LENGTH


def test_a_handle_belongs_to_one_request():
    core = make_core()
    core.add_request(request(0))
    with pytest.raises(InvalidParameter, match="handle=0 is not allowed: another request has it"):
        core.add_request(request(0, length=9))
    with pytest.raises(InvalidType, match="request_ids=0.5"):
        core.abort_requests([0.5])
    assert drain(core)[0] == {0: expected(0)}


def test_a_request_that_can_never_run_ends_alone():
    core = make_core(num_blocks=6)
    core.add_request(request(0, length=30, max_tokens=9))
    core.add_request(request(1))
    tokens, ends = drain(core)
    assert ends[0].reason is FinishReason.ERROR
    assert "KV blocks" in ends[0].message
    assert tokens == {1: expected(1)}


@pytest.mark.parametrize("depth", [1, 2, 4])
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
