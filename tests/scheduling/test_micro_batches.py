"""Requests run in as many parts as a pipeline has stages, so that each stage has one."""

from tests.scheduling.scene import FULL, STATE, Scene, sliding


def started(count, **config):
    """Requests whose prompts have been computed; their next ids are on the host."""
    scene = Scene(**config)
    for handle in range(count):
        scene.add(handle, 3, needs_host_ids=True)
    return scene


def in_flight(scene):
    """The handles of the steps that can be planned now, as many in flight as there are stages."""
    plans = []
    while len(scene.scheduler.in_flight) < scene.scheduler.config.micro_batches:
        plan = scene.plan()
        if plan is None:
            break
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


def test_chunks_of_a_prompt_alone_follow_each_other_through_the_stages():
    scene = Scene(micro_batches=3, max_num_batched_tokens=8)
    scene.add(0, 28, needs_host_ids=True)
    plans, _ = in_flight(scene)
    for expected in (8, 8, 8, 4):
        plan = plans.pop(0)
        assert scene.tokens(plan) == {0: expected}
        scene.finish(plan)
        plans += in_flight(scene)[0]
    # the next token is known when the last chunk has been read
    assert [scene.tokens(plan) for plan in plans] == [{0: 1}]


def test_a_newcomer_comes_before_the_chunk_that_would_follow():
    scene = Scene(micro_batches=2, max_num_batched_tokens=8)
    scene.add(0, 40, needs_host_ids=True)
    (first, _), handles = in_flight(scene)
    assert handles == [[0], [0]]
    scene.add(1, 3, needs_host_ids=True)
    scene.finish(first)
    assert in_flight(scene)[1] == [[1]]


def test_a_chunk_that_follows_takes_no_blocks_from_anybody():
    scene = Scene(micro_batches=2, max_num_batched_tokens=8, num_blocks=7, groups=(sliding(5),))
    scene.add(0, 24, max_tokens=1, needs_host_ids=True)
    plans = []
    while scene.scheduler.has_work:
        plans += in_flight(scene)[0]
        scene.finish(plans.pop(0))
    assert scene.scheduler.counters.num_preemptions == 0 and scene.outputs == {0: [7]}


def test_blocks_that_a_chunk_in_flight_reads_are_kept_for_it():
    """It may have to be run again."""
    scene = Scene(micro_batches=2, max_num_batched_tokens=8, groups=(sliding(5),))
    request = scene.add(0, 24, needs_host_ids=True)
    (first, _), _ = in_flight(scene)
    assert request.num_expired == [0]
    scene.finish(first)
    in_flight(scene)
    # the queries of the chunk in flight begin at 8, and read from 4 on
    assert request.num_expired == [1]


def test_a_recurrent_state_is_not_overtaken():
    """A chunk reads the state that the one after the next writes over."""
    scene = Scene(micro_batches=2, max_num_batched_tokens=8, groups=(FULL, STATE))
    scene.add(0, 20, needs_host_ids=True)
    for expected in (8, 8):
        (plan,), _ = in_flight(scene)
        assert scene.tokens(plan) == {0: expected}
        scene.finish(plan)


def test_a_chunk_that_fails_ends_its_request_and_the_chunk_that_follows_counts_for_nothing():
    scene = Scene(micro_batches=2, max_num_batched_tokens=8)
    scene.add(0, 40, needs_host_ids=True)
    (first, second), _ = in_flight(scene)
    scene.finish(first, errors={0: "injected"})
    assert scene.ends == {0: "ERROR"}
    scene.finish(second)
    assert not scene.scheduler.has_work
