"""A failure in a step costs the requests that are at fault, and nobody else."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.core import fault_isolation
from quire.engine.wire.output_parts import FinishReason
from quire.errors import EngineDeadError
from quire.scheduling import request as requests
from quire.scheduling import scheduler
from quire.step.columns import RoutedExperts, RunnerOutput
from quire.step.faults import RowFailures, processor_text
from quire.step.plan import StepPlan
from quire.step.result import StepResult
from tests.engine.core.core_over_hashes import drain, expected, make_core, request
from tests.support.simulation import invariants

depths = pytest.mark.parametrize("depth", [1, 2])


def handles_of(core, plan):
    running = core.scheduler.running
    rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
    return {running[row].handle for row in rows if row in running}


def poisoned_core(poison, *, at_output=0, **config):
    """A core whose executor fails, naming nobody, for every plan with a poisonous request that has
    so many ids.
    """

    def fail(plan):
        for running in core.scheduler.running.values():
            if running.handle in poison & handles_of(core, plan):
                assert len(running.output_token_ids) < at_output, "the kernel at 0x7f9b1c604ba0"

    core = make_core(fail=fail, **config)
    return core


def serve(core, num_requests=6):
    for handle in range(num_requests):
        core.add_request(request(handle))
    return drain(core)


@depths
@pytest.mark.parametrize("poison", [{0}, {3}, {5}, {1, 4}, {0, 1, 2, 3, 4, 5}])
@pytest.mark.parametrize("at_output", [0, 1, 4])
def test_only_the_culprits_fail(depth, poison, at_output):
    core = poisoned_core(poison, at_output=at_output, depth=depth)
    tokens, ends = serve(core)
    failed = {h for h, end in ends.items() if end.reason is FinishReason.ERROR}
    assert failed == poison
    for handle in range(6):
        right = expected(handle)
        if handle in poison:
            assert tokens.get(handle, []) == right[: len(tokens.get(handle, []))]
            assert ends[handle].message == fault_isolation.ALONE
        else:
            assert tokens[handle] == right


@depths
@pytest.mark.parametrize("when", range(2, 10))
def test_a_failure_that_passes_costs_nobody_while_there_are_several(depth, when):
    calls = []

    def fail(plan):
        calls.append(plan)
        if len(calls) == when and len(handles_of(core, plan)) > 1:
            raise RuntimeError("once")

    core = make_core(depth=depth, fail=fail)
    tokens, ends = serve(core)
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert tokens == {handle: expected(handle) for handle in range(6)}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_named_and_unnamed_failures(data):
    named = data.draw(st.sets(st.integers(0, 7), max_size=3))
    unnamed = data.draw(st.sets(st.integers(0, 7), max_size=3))
    first = data.draw(st.integers(0, 10))
    depth = data.draw(st.sampled_from([1, 2]))

    def fail(plan):
        if plan.step_id < first:
            return
        errors = {
            row: "named"
            for row in [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
            if row in core.scheduler.running and core.scheduler.running[row].handle in named
        }
        if errors:
            raise RowFailures(errors)
        if unnamed & handles_of(core, plan):
            raise RuntimeError("unnamed")

    core = make_core(depth=depth, fail=fail, num_blocks=data.draw(st.sampled_from([12, 40])))
    tokens, ends = serve(core, 8)
    for handle, end in ends.items():
        right, got = expected(handle), tokens.get(handle, [])
        assert got == right[: len(got)]
        if handle in named | unnamed:
            assert end.reason is FinishReason.ERROR or got == right
        else:
            assert end.reason is FinishReason.LENGTH and got == right


@depths
def test_results_that_cannot_be_read_are_read_again(depth):
    core = make_core(depth=depth)
    launch = core.executor.launch
    reads = []

    def flaky(plan):
        step = launch(plan)
        read = step.result

        def result():
            reads.append(plan.step_id)
            if len(reads) % 3 == 0:
                raise OSError("not now")
            return read()

        step.result = result
        return step

    core.executor.launch = flaky
    tokens, ends = serve(core)
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert tokens == {handle: expected(handle) for handle in range(6)}


def test_a_device_that_takes_no_step_is_dead():
    def fail(plan):
        raise RuntimeError("gone")

    core = make_core(fail=fail)
    core.add_request(request(0))
    core.add_request(request(1))
    with pytest.raises(EngineDeadError, match=r"see the log"):
        core.step()


@depths
@pytest.mark.parametrize("point", ["find_stop", "stop_ids"])
def test_a_failure_in_the_scheduler_s_handling_of_one_request_is_its_own(depth, point, monkeypatch):
    real = getattr(requests, point)

    def fail(asked, *rest):
        if asked.handle == 2:
            raise KeyError("stop at 0x7f9b1c604ba0")
        return real(asked, *rest)

    monkeypatch.setattr(scheduler, point, fail)
    core = make_core(depth=depth)
    tokens, ends = serve(core)
    assert {h for h, end in ends.items() if end.reason is FinishReason.ERROR} == {2}
    assert "0x" not in ends[2].message
    assert {h: t for h, t in tokens.items() if h != 2} == {
        handle: expected(handle) for handle in range(6) if handle != 2
    }


def test_a_salt_that_cannot_be_encoded_fails_its_request():
    core = make_core()
    bad = request(0)
    bad.cache_salt = "\ud800"
    core.add_request(bad)
    core.add_request(request(1))
    tokens, ends = drain(core)
    assert ends[0].reason is FinishReason.ERROR
    assert tokens == {1: expected(1)}


def test_content_of_a_failed_request_is_not_found():
    core = poisoned_core({0}, at_output=3, key_size=1)
    core.add_request(request(0))
    drain(core)
    pool = core.scheduler.memory.pool
    assert len(pool._by_key) == 6  # the prompt, as steps that succeeded wrote it
    invariants.check_idle(core.scheduler)


class Hostile(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("too long"), "ValueError: too long"),
        (ValueError(""), "ValueError"),
        (ValueError("a <x at 0x7f9b1c604ba0>\nTraceback"), "ValueError: a <x at 0x...>"),
        (Hostile(), "Hostile"),
    ],
)
def test_a_processor_s_own_words_are_kept_without_addresses(error, text):
    shown = processor_text(error)
    assert shown == f"a logits processor failed: {text}"
    assert not re.search(r"0x[0-9a-f]{6,}", shown)


@depths
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_device_that_failed_is_nobody_s_fault(depth, where):
    """No request is blamed, and no step is tried in halves: the core ends."""

    def fail(plan):
        if where == "launch" and plan.step_id == 3:
            raise EngineDeadError("The GPU failed: an illegal address")

    core = make_core(depth=depth, fail=fail)
    for handle in range(4):
        core.add_request(request(handle))
    if where == "result":
        launch = core.executor.launch

        def launched(plan):
            step = launch(plan)
            if plan.step_id == 3:
                step.result = lambda: fail_reading()
            return step

        core.executor.launch = launched
    with pytest.raises(EngineDeadError, match="illegal address"):
        for _ in range(20):
            assert not core.step().finished
    assert core.executor.num_launched <= 3 + depth


def fail_reading():
    raise EngineDeadError("The GPU failed: an illegal address")


def test_a_step_that_ran_in_parts_reports_the_experts_of_all():
    plan = StepPlan(4, [], [], [], [0, 1], [])
    step = fault_isolation.GuardedStep(plan)
    for row in (0, 1):
        output = RunnerOutput(StepResult(4, [50 + row]), parts=[RoutedExperts(row, 3, None)])
        part = fault_isolation.without(plan, {1 - row})
        step.parts.append((part, SimpleNamespace(result=lambda output=output: output)))
    found = step.result()
    assert found.result.token_ids == [50, 51]
    assert [columns.handle for columns in found.parts] == [0, 1]
