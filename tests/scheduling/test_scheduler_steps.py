"""How a request goes through steps: its prompt in chunks, then token by token, to its end."""

import pytest

from quire.errors import RequestError
from quire.params import RepetitionDetectionParams, SamplingParams
from quire.scheduling.settings import Pause
from tests.scheduling.scene import TOKEN, Scene


def test_a_prompt_is_computed_in_one_step_where_it_fits_and_gives_a_token():
    scene = Scene()
    scene.add(0, 10)
    plan = scene.plan()
    [new] = plan.added
    assert (new.num_prompt_tokens, new.num_computed_tokens) == (10, 0)
    assert len(new.block_ids[0]) == 3, "10 tokens take three blocks of 4"
    [chunk] = plan.chunks
    assert (chunk.row, chunk.num_tokens, chunk.samples) == (new.row, 10, True)
    scene.finish(plan)
    assert scene.outputs == {0: [TOKEN]}


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_samples_with_the_last():
    scene = Scene(max_num_batched_tokens=4)
    scene.add(0, 10)
    chunks = [scene.step().chunks[0] for _ in range(3)]
    assert [(c.num_tokens, c.samples) for c in chunks] == [(4, False), (4, False), (2, True)]


def test_prompts_share_the_budget_of_a_step_in_the_order_of_arrival():
    scene = Scene(max_num_batched_tokens=8)
    for handle in range(3):
        scene.add(handle, 5)
    assert scene.tokens(scene.step()) == {0: 5, 1: 3}
    assert scene.tokens(scene.step()) == {0: 1, 1: 2, 2: 5}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_has_room_for_all_of_it():
    scene = Scene(max_num_batched_tokens=8, max_len=8, enable_chunked_prefill=False)
    scene.add(0, 5)
    scene.add(1, 5)
    assert scene.tokens(scene.step()) == {0: 5}
    assert scene.tokens(scene.step()) == {0: 1, 1: 5}


def test_decoding_rows_come_before_prompts():
    scene = Scene(max_num_batched_tokens=4)
    scene.add(0, 2)
    scene.step()
    scene.add(1, 10)
    assert scene.tokens(scene.step()) == {0: 1, 1: 3}


def test_a_steady_decode_step_repeats_the_same_list_of_rows_and_says_nothing_else():
    scene = Scene(key_size=16)
    for handle in range(3):
        scene.add(handle, 2)
    scene.step()
    first, second = scene.step(), scene.step()
    assert first.decode_rows is second.decode_rows
    assert not (second.added or second.removed or second.new_blocks or second.chunks)


def test_a_decoding_row_gets_a_block_exactly_when_it_needs_one():
    scene = Scene()
    scene.add(0, 3)
    scene.step()
    grown = [len(scene.step().new_blocks) for _ in range(9)]
    assert grown == [0, 1, 0, 0, 0, 1, 0, 0, 0], "at tokens 4 and 8"


def test_a_step_can_be_planned_before_the_last_one_is_read():
    scene = Scene()
    scene.add(0, 3, max_tokens=3)
    first, second = scene.plan(), scene.plan()
    assert second.decode_rows == [scene.row(0)], "its input token is known in the row alone"
    third = scene.plan()
    assert scene.plan() is None, "three tokens are on their way, which is all it may have"
    for plan in (first, second, third):
        scene.finish(plan)
    assert scene.ends == {0: "LENGTH"} and scene.outputs == {0: [TOKEN] * 3}


def test_a_request_that_needs_its_ids_on_the_host_is_not_planned_ahead():
    scene = Scene()
    scene.add(0, 3, needs_host_ids=True)
    first = scene.plan()
    assert scene.plan() is None
    scene.finish(first)
    assert scene.tokens(scene.plan()) == {0: 1}


# How it ends


def test_it_ends_at_max_tokens_and_everything_is_given_back():
    scene = Scene()
    scene.add(0, 5, max_tokens=2)
    scene.steps(2)
    assert scene.ends == {0: "LENGTH"} and scene.outputs == {0: [TOKEN, TOKEN]}
    assert scene.running == [] and scene.num_free == 100


def test_it_ends_at_the_model_s_length():
    scene = Scene(max_len=8)
    scene.add(0, 6, max_tokens=20)
    scene.steps(3)
    assert scene.ends == {0: "LENGTH"} and len(scene.outputs[0]) == 2


def test_it_ends_at_eos_and_at_a_stop_id():
    scene = Scene()
    for handle in range(2):
        params = SamplingParams(max_tokens=9, stop_token_ids=[5])
        params.update_from_generation_config({}, 2)
        scene.add(handle, 3, params=params)
    scene.step(tokens={0: [4], 1: [4]})
    scene.step(tokens={0: [2], 1: [5]})
    assert scene.ends == {0: "STOP", 1: "STOP"}


def test_it_ends_when_its_output_repeats_where_that_is_asked_for():
    scene = Scene()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    params.repetition_detection = RepetitionDetectionParams(
        max_pattern_size=1, min_pattern_size=1, min_count=3
    )
    scene.add(0, 3, params=params)
    scene.steps(3)
    assert scene.ends == {0: "REPETITION"} and len(scene.outputs[0]) == 3


def test_a_token_that_was_already_on_its_way_after_the_end_counts_for_nothing():
    scene = Scene()
    scene.add(0, 3, params=SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[5]))
    first, second = scene.plan(), scene.plan()
    scene.finish(first, tokens={0: [5]})
    scene.finish(second)
    assert scene.outputs == {0: [5]} and scene.ends == {0: "STOP"}


def test_an_aborted_request_leaves_at_once_and_says_nothing():
    scene = Scene()
    scene.add(0, 3)
    scene.add(1, 3)
    first = scene.plan()
    assert scene.scheduler.abort(0)
    assert not scene.scheduler.abort(0), "it has ended already"
    scene.finish(first)
    assert scene.outputs == {1: [TOKEN]} and scene.ends == {}
    assert scene.step().removed, "the runner hears of it with the next plan"


def test_a_row_that_fails_ends_its_request_alone():
    scene = Scene()
    scene.add(0, 3)
    scene.add(1, 3)
    scene.step(errors={0: "broken"})
    assert scene.ends == {0: "ERROR"} and scene.outputs == {1: [TOKEN]}


# Pauses


def test_paused_for_new_requests_the_running_ones_go_on():
    scene = Scene()
    scene.add(0, 3)
    scene.step()
    scene.scheduler.pause = Pause.NEW
    scene.add(1, 3)
    assert scene.tokens(scene.step()) == {0: 1}
    scene.scheduler.pause = Pause.NONE
    assert scene.tokens(scene.step()) == {0: 1, 1: 3}


def test_paused_altogether_nothing_is_planned():
    scene = Scene()
    scene.add(0, 3)
    scene.scheduler.pause = Pause.ALL
    assert scene.plan() is None and not scene.scheduler.has_work
    scene.scheduler.pause = Pause.NONE
    assert scene.plan() is not None


# What is refused


@pytest.mark.parametrize(
    ("config", "request_", "text"),
    [
        ({"max_len": 8}, {"prompt": 9}, "9 tokens cannot be scheduled"),
        ({"num_blocks": 3}, {"prompt": 9}, "needs 8 KV blocks, the cache has 2"),
        ({"max_num_batched_tokens": 8}, {"prompt": 9, "is_indivisible": True}, "fit into 8 tokens"),
        ({}, {"prompt": 9, "is_indivisible": True, "resumable": True}, "no further input"),
    ],
)
def test_what_could_never_run_is_refused_when_it_arrives(config, request_, text):
    scene = Scene(**config)
    with pytest.raises(RequestError, match=text):
        scene.add(0, **request_)
    assert not scene.scheduler.has_work
