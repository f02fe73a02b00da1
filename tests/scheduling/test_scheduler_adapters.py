"""Which adapters have slots, who is passed over, and for how long."""

import random

import pytest

from quire.scheduling.adapter_slots import SlotAllocator
from tests.scheduling.scene import Scene


def scene_of(num_slots, *, passes=64, kept=range(1, 1000), **config):
    scene = Scene(num_adapter_slots=num_slots, max_adapter_passes=passes, **config)
    scene.scheduler.adapters.kept.update(kept)
    return scene


def test_an_adapter_is_loaded_before_its_first_step_and_stays():
    scene = scene_of(2)
    scene.add(0, 3, max_tokens=2, adapter=70)
    plan = scene.step()
    assert plan.adapter_loads == [(1, 70)] and plan.added[0].adapter == 1
    scene.step()
    scene.add(1, 3, max_tokens=1, adapter=70)
    assert scene.step().adapter_loads == []


def test_rows_without_an_adapter_need_no_slot():
    scene = scene_of(1)
    for handle, adapter in enumerate((70, 0, 70, 0)):
        scene.add(handle, 3, adapter=adapter)
    plan = scene.step()
    assert [new.adapter for new in plan.added] == [1, 0, 1, 0]
    assert plan.adapter_loads == [(1, 70)]


def test_a_request_without_a_slot_is_skipped_and_gets_the_one_used_longest_ago():
    scene = scene_of(2)
    scene.add(0, 3, max_tokens=2, adapter=70)
    scene.add(1, 3, max_tokens=1, adapter=71)
    scene.add(2, 3, max_tokens=1, adapter=72)
    scene.add(3, 3, max_tokens=9, adapter=71)
    scene.step()
    assert scene.running == [0, 3] and scene.waiting == [2]
    plan = scene.step()
    assert scene.waiting == [2] and plan.adapter_loads == []
    assert scene.step().adapter_loads == [(1, 72)], "70 has ended, 71 has a request"


def test_weights_that_are_not_there_are_wanted_and_hold_back_nobody():
    scene = scene_of(1, kept=[71])
    scene.add(0, 3, adapter=70)
    scene.add(1, 3, max_tokens=2, adapter=71)
    adapters = scene.scheduler.adapters
    scene.step()
    assert scene.running == [1] and list(adapters.wanted) == [70]
    scene.step()
    adapters.kept.add(70)
    assert scene.step().adapter_loads == [(1, 70)]


def test_only_as_many_are_wanted_as_there_are_slots():
    scene = scene_of(2, kept=[])
    for handle in range(6):
        scene.add(handle, 3, adapter=70 + handle)
    assert scene.plan() is None
    assert list(scene.scheduler.adapters.wanted) == [70, 71]


def test_a_slot_is_not_filled_while_a_step_in_flight_uses_it():
    scene = scene_of(1)
    scene.add(0, 3, adapter=70)
    scene.add(1, 3, adapter=71)
    first, second = scene.plan(), scene.plan()
    scene.finish(first)
    scene.scheduler.abort(0)
    assert scene.plan() is None, "the second step has request 0's row"
    scene.finish(second)
    assert scene.plan().adapter_loads == [(1, 71)]


def test_a_pinned_adapter_keeps_its_slot():
    scene = scene_of(2)
    adapters = scene.scheduler.adapters
    adapters.pinned.add(70)
    for handle, adapter in enumerate((70, 71, 72, 73)):
        scene.add(handle, 3, max_tokens=1, adapter=adapter)
    scene.steps(3)
    assert set(adapters.in_slots) == {70, 73}
    assert not adapters.is_hopeless(99)
    adapters.pinned.add(73)
    assert adapters.is_hopeless(99) and not adapters.is_hopeless(73)


def test_a_pinned_adapter_without_a_slot_is_wanted():
    scene = scene_of(1, kept=[])
    scene.scheduler.adapters.pinned.add(70)
    scene.add(0, 3, adapter=70)
    assert scene.plan() is None and list(scene.scheduler.adapters.wanted) == [70]


def test_forgetting_frees_the_slots_that_nobody_uses():
    scene = scene_of(2)
    scene.add(0, 3, max_tokens=1, adapter=70)
    scene.add(1, 3, max_tokens=9, adapter=71)
    scene.step()
    scene.scheduler.adapters.forget([70, 71, 72])
    assert set(scene.scheduler.adapters.in_slots) == {71}


def test_an_idle_request_leaves_its_slot_to_others():
    scene = scene_of(1)
    scene.add(0, 3, max_tokens=2, adapter=70, resumable=True)
    scene.add(1, 3, max_tokens=1, adapter=71)
    scene.steps(3)
    assert scene.ends == {1: "LENGTH"} and scene.scheduler.requests[0].row < 0
    scene.scheduler.extend(0, [5], resumable=False)
    plan = scene.step()
    assert plan.adapter_loads == [(1, 70)]


PASSES, LENGTH = 5, 7


def steps_until_it_runs(scene, *, cold, hot, most=200):
    """Requests of the hot adapters keep coming, before and after one with `cold`: how many steps
    pass until that one has a row.
    """
    chance, handle = random.Random(3), 0
    for step in range(most):
        for adapter in hot:
            length = chance.randrange(2, LENGTH + 1)
            scene.add(handle, 2, max_tokens=length, adapter=adapter)
            handle += 1
        if step == 10:
            scene.add(10_000, 2, max_tokens=1, adapter=cold)
        scene.step()
        if step >= 10 and 10_000 not in scene.waiting:
            return step - 10
    return None


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_rare_adapter_waits_for_a_bounded_time(num_slots):
    scene = scene_of(num_slots, passes=PASSES, max_num_seqs=64, max_num_batched_tokens=512)
    steps = steps_until_it_runs(scene, cold=99, hot=range(1, num_slots + 1))
    assert PASSES <= steps <= PASSES + LENGTH + 1, "one slot has drained then"


def test_without_the_bound_it_starves(monkeypatch):
    monkeypatch.setattr(SlotAllocator, "_drain", lambda self: None)
    scene = scene_of(2, passes=PASSES, max_num_seqs=64, max_num_batched_tokens=512)
    assert steps_until_it_runs(scene, cold=99, hot=(1, 2)) is None


def test_who_was_passed_over_gets_the_slot_even_if_its_weights_come_late():
    """Others have theirs in memory all the time."""
    scene = scene_of(1, passes=PASSES, kept=[1], max_num_seqs=64, max_num_batched_tokens=512)
    assert steps_until_it_runs(scene, cold=99, hot=[1], most=60) is None
    assert list(scene.scheduler.adapters.wanted) == [99] and scene.running == []
    scene.scheduler.adapters.kept.add(99)
    assert (1, 99) in scene.step().adapter_loads


def test_many_adapters_through_few_slots_all_run():
    chance = random.Random(5)
    scene = scene_of(4, passes=8, kept=[], max_num_seqs=16, num_blocks=400)
    adapters, kept = scene.scheduler.adapters, []
    for handle in range(400):
        scene.add(handle, 2, max_tokens=chance.randrange(1, 6), adapter=1 + handle * 7 % 200)
    for _ in range(4000):
        scene.step()
        kept += [number for number in adapters.wanted if number not in adapters.kept]
        kept = [n for n in kept if n in adapters.needed] + kept[-4:]
        adapters.kept.clear()
        adapters.kept.update(kept[-8:])
        if not scene.scheduler.requests:
            break
    assert len(scene.ends) == 400 and set(scene.ends.values()) == {"LENGTH"}
