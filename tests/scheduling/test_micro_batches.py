"""Requests run in as many parts as a pipeline has stages, so that each stage has one."""

from tests.scheduling.scene import Scene


def started(count, **config):
    """Requests whose prompts have been computed; their next ids are on the host."""
    scene = Scene(**config)
    for handle in range(count):
        scene.add(handle, 3, needs_host_ids=True)
    return scene


def in_flight(scene):
    """The handles of the steps that can be planned now."""
    plans = []
    while (plan := scene.plan()) is not None:
        plans.append(plan)
    return plans, [sorted(scene.tokens(plan)) for plan in plans]


def test_prompts_and_decodes_are_shared_out_over_the_steps_in_flight():
    scene = started(5, micro_batches=2)
    plans, handles = in_flight(scene)
    assert handles == [[0, 1, 2], [3, 4]]
    for plan in plans:
        scene.finish(plan)
    assert in_flight(scene)[1] == [[0, 1, 2], [3, 4]]


def test_fewer_requests_than_stages_have_a_step_each():
    assert in_flight(started(2, micro_batches=4))[1] == [[0], [1]]


def test_one_stage_takes_all_at_once():
    assert in_flight(started(5))[1] == [[0, 1, 2, 3, 4]]


def test_requests_that_wait_for_a_row_do_not_make_the_parts_larger():
    assert in_flight(started(9, micro_batches=2, max_num_seqs=4))[1] == [[0, 1], [2, 3]]


def test_a_part_that_comes_back_goes_on_at_once_and_newcomers_join_it():
    scene = started(4, micro_batches=2)
    (first, _), _ = in_flight(scene)
    scene.add(4, 3, needs_host_ids=True)
    scene.finish(first)
    assert in_flight(scene)[1] == [[0, 1, 4]]


def test_chunks_of_one_prompt_leave_stages_to_others():
    scene = Scene(micro_batches=2, max_num_batched_tokens=8)
    for handle in range(2):
        scene.add(handle, 20, needs_host_ids=True)
    (first, second), handles = in_flight(scene)
    assert handles == [[0], [1]]
    scene.finish(first)
    (third,), handles = in_flight(scene)
    assert handles == [[0]] and scene.tokens(third) == {0: 8}
    scene.finish(second)
    assert in_flight(scene)[1] == [[1]]


def test_a_prompt_alone_is_computed_chunk_after_chunk():
    scene = Scene(micro_batches=2, max_num_batched_tokens=8)
    scene.add(0, 20, needs_host_ids=True)
    for expected in (8, 8, 4, 1):
        (plan,), _ = in_flight(scene)
        assert scene.tokens(plan) == {0: expected}
        scene.finish(plan)
