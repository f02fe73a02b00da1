"""A request that draws no token: it ends with its prompt, and a step knows no result of it."""

import pytest

from quire.params import PoolingParams
from tests.scheduling.scene import TOKEN, Scene

POOL = PoolingParams(task="embed")


def test_it_ends_with_the_step_that_completes_its_prompt():
    scene = Scene(max_num_batched_tokens=4)
    scene.add(0, 10, params=POOL)
    plans = [scene.plan()]
    assert plans[0].added[0].params is POOL
    assert not scene.finish(plans[0]).finished
    plans += scene.steps(2)
    assert [plan.sampled_rows for plan in plans] == [[], [], []]
    assert [chunk.num_tokens for plan in plans for chunk in plan.chunks] == [4, 4, 2]
    assert scene.ends == {0: "STOP"} and scene.outputs == {}
    assert scene.num_free == 100 and not scene.scheduler.has_work


def test_its_start_is_told_with_its_end():
    scene = Scene()
    scene.add(0, 8, params=POOL)
    out = scene.finish(scene.plan())
    assert [start.handle for start in out.started] == [end.handle for end in out.finished] == [0]


def test_it_shares_steps_with_requests_that_generate():
    scene = Scene()
    scene.add(0, 5, max_tokens=3)
    scene.add(1, 6, params=POOL)
    plan = scene.step()
    assert scene.tokens(plan) == {0: 5, 1: 6} and plan.sampled_rows == [plan.chunks[0].row]
    assert scene.ends == {1: "STOP"}
    scene.steps(2)
    assert scene.outputs == {0: [TOKEN] * 3} and scene.ends[0] == "LENGTH"


def test_a_step_ahead_has_nothing_of_a_prompt_that_is_in_flight():
    scene = Scene()
    scene.add(0, 6, params=POOL)
    first = scene.plan()
    assert scene.plan() is None and scene.scheduler.has_work
    scene.finish(first)
    assert scene.ends == {0: "STOP"}


def test_the_longest_prompt_needs_no_room_for_a_token():
    scene = Scene(max_len=16, num_blocks=5, max_num_batched_tokens=16)
    scene.add(0, 16, params=POOL)
    scene.step()
    assert scene.ends == {0: "STOP"}


def test_a_repeated_prompt_finds_its_blocks_unless_it_must_compute_every_token():
    scene = Scene()
    ids = list(range(100, 112))
    for handle, skips in ((0, None), (1, None), (2, True)):
        params = PoolingParams(skip_reading_prefix_cache=skips)
        scene.add(handle, ids, params=params)
        assert scene.tokens(scene.step()) == {handle: 4 if handle == 1 else 12}


@pytest.mark.parametrize("count", [1, 2])
def test_one_that_failed_or_was_preempted_gets_no_result(count):
    scene = Scene(max_num_batched_tokens=6)
    for handle in range(2):
        scene.add(handle, 6, params=POOL)
    plan = scene.plan()
    ahead = scene.plan() if count == 2 else None
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    out = scene.finish(plan)
    assert not out.finished, "it starts over"
    if ahead is not None:
        assert not scene.finish(ahead).finished
    scene.step(errors={0: "broken"})
    assert scene.ends == {0: "ERROR"}
    scene.steps(2)
    assert scene.ends == {0: "ERROR", 1: "STOP"}
