"""Drafts: guesses in a row that one step verifies, so that a request may gain several tokens."""

import pytest

from quire.params import SamplingParams
from quire.step.plan import NULL_BLOCK
from tests.scheduling.scene import TOKEN, Scene, sliding


def started(ready=3, handles=(0,), prompt=3, config=None, **request):
    """Requests that have one token, and drafts for their next step."""
    scene = Scene(num_drafts=3, **config or {})
    for handle in handles:
        scene.add(handle, prompt, **request)
    scene.step(drafts=dict.fromkeys(handles, ready))
    return scene


def test_a_prompt_has_no_drafts():
    scene = Scene(num_drafts=3)
    scene.add(0, 3)
    plan = scene.plan()
    assert plan.decode_drafts is None and plan.sampled_drafts == [0]


def test_the_drafts_that_are_ready_are_verified_in_the_next_step():
    scene = started(ready=2)
    plan = scene.plan()
    assert (plan.decode_drafts, plan.num_tokens) == ([2], 3)
    scene.finish(plan, tokens={0: [11, 12, 13]}, drafts={0: 1})
    assert scene.outputs[0] == [TOKEN, 11, 12, 13], "two right drafts and the token after them"
    assert scene.plan().decode_drafts == [1]


def test_wrong_drafts_are_taken_back():
    scene = started(ready=3)
    scene.step(tokens={0: [11]})
    request = scene.scheduler.requests[0]
    assert scene.outputs[0] == [TOKEN, 11]
    assert scene.scheduler.lane.position(request) == 4, "as without drafts"


def test_with_a_step_in_flight_as_many_drafts_are_expected_as_there_were():
    scene = started(ready=1)
    first = scene.plan()
    assert first.decode_drafts == [1]
    assert scene.plan().decode_drafts == [1], "what the first step leaves is not known yet"


def test_all_drafts_of_a_step_are_bounded():
    scene = started(handles=(0, 1, 2), ready=3, config={"max_drafts": 4})
    assert scene.plan().decode_drafts == [3, 1, 0]


def test_memory_is_taken_for_the_longest_that_a_request_can_be():
    scene = started(ready=3)  # 3 tokens computed, one block of 4
    assert [len(new.block_ids) for new in scene.plan().new_blocks] == [1], "tokens 3 to 6"
    [new] = scene.plan().new_blocks
    assert len(scene.blocks(0)) == 3, "tokens 7 to 10, if all drafts are right"
    assert new.first == 2


def test_a_window_moves_by_the_shortest_that_a_request_can_be():
    scene = started(config={"groups": (sliding(4),)}, prompt=7)
    scene.plan()  # tokens 7 to 10, or 7 alone
    scene.plan()  # from 11 on, or from 8 on, which reads 5 to 8
    assert scene.blocks(0)[0] == NULL_BLOCK and NULL_BLOCK not in scene.blocks(0)[1:]


def test_drafts_get_what_the_rest_leaves_of_the_budget():
    scene = started(handles=(0, 1), config={"max_num_batched_tokens": 6})
    scene.add(2, 2)
    plan = scene.plan()
    assert scene.tokens(plan) == {0: 3, 1: 1, 2: 2}
    assert plan.decode_drafts == [2, 0]


def test_drafts_are_left_out_where_blocks_are_short_and_preempt_nothing():
    scene = started(handles=(0, 1), config={"num_blocks": 4}, max_tokens=5)
    assert scene.num_free == 1
    plan = scene.plan()
    assert scene.running == [0, 1]
    assert scene.tokens(plan) == {0: 4, 1: 1}, "request 1 has a block for one more token"


def test_a_stop_inside_right_drafts_drops_what_follows():
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[5])
    scene = started(params=params)
    out = scene.finish(scene.plan(), tokens={0: [11, 5, 12, 13]})
    assert scene.ends == {0: "STOP"} and scene.outputs[0] == [TOKEN, 11, 5]
    assert (list(out.token_ids), out.counts, out.kept) == ([11, 5], [2], [0, 1])


class EndsAtTwelve:
    is_ready = True

    def has_ended(self, output_token_ids):
        return output_token_ids[-1] == 12


def test_a_grammar_that_ends_inside_right_drafts_drops_what_follows():
    scene = started(grammar=EndsAtTwelve())
    scene.step(tokens={0: [11, 12, 13]})
    assert scene.ends == {0: "STOP"} and scene.outputs[0] == [TOKEN, 11, 12]


@pytest.mark.parametrize("max_tokens", range(2, 10))
@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_can_bring_more_than_max_tokens(max_tokens, depth):
    scene = Scene(num_drafts=3)
    scene.add(0, 3, max_tokens=max_tokens)
    flying = []
    while scene.scheduler.has_work:
        while len(flying) < depth and (plan := scene.plan()) is not None:
            flying.append(plan)
        plan = flying.pop(0)
        most = [1 + count for count in plan.sampled_drafts]
        scene.finish(plan, tokens={0: [TOKEN] * sum(most)}, drafts={0: 3})
    assert scene.ends == {0: "LENGTH"} and scene.outputs[0] == [TOKEN] * max_tokens


def test_a_last_step_whose_drafts_were_wrong_was_not_the_last():
    scene = started(ready=3, max_tokens=5)
    assert scene.tokens(scene.step(tokens={0: [11]})) == {0: 4}, "could have been the end"
    assert scene.ends == {}
    assert scene.tokens(scene.step(tokens={0: [12]})) == {0: 1}
    scene.steps(2)
    assert scene.outputs[0] == [TOKEN, 11, 12, TOKEN, TOKEN] and scene.ends == {0: "LENGTH"}


def test_a_request_that_needs_its_ids_on_the_host_verifies_drafts_too():
    scene = started(ready=2, needs_host_ids=True)
    plan = scene.plan()
    [chunk] = plan.chunks
    assert (chunk.num_tokens, chunk.num_drafts, chunk.samples) == (3, 2, True)
    assert scene.plan() is None
    scene.finish(plan, tokens={0: [11, 12]}, drafts={0: 3})
    assert scene.outputs[0] == [TOKEN, 11, 12]
    assert scene.plan().chunks[0].num_drafts == 3


def test_only_accepted_tokens_are_found_in_the_prefix_cache():
    scene = started(ready=3, prompt=[1, 2, 3, 4, 5, 6], max_tokens=3)
    scene.step(tokens={0: [11]}, drafts={0: 3})  # K/V of wrong drafts is at tokens 8 and 9
    scene.step(tokens={0: [12]})
    assert scene.ends == {0: "LENGTH"}
    scene.add(1, [1, 2, 3, 4, 5, 6, TOKEN, 11, 12, 13], max_tokens=1)
    assert scene.step().added[0].num_computed_tokens == 8


def test_a_preempted_request_loses_its_drafts_and_keeps_its_tokens():
    scene = started(ready=3)
    scene.step(tokens={0: [11, 12]}, drafts={0: 3})
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    plan = scene.plan()
    assert plan.added[0].token_ids[3:] == [TOKEN, 11, 12]
    assert plan.chunks[0].num_drafts == 0 and plan.decode_drafts is None
