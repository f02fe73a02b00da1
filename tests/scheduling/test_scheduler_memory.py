"""Blocks: what is found again in the prefix cache, what a window gives back, who gives way."""

import pytest

from quire.params import SamplingParams
from quire.scheduling.settings import KVGroupSpec
from quire.step.plan import NULL_BLOCK
from tests.scheduling.scene import FULL, TOKEN, Scene, sliding

PROMPT = list(range(100, 110))
"""10 tokens: two full blocks of 4, and two tokens."""


def run_to_its_end(scene, handle, prompt, **request):
    scene.add(handle, prompt, max_tokens=1, **request)
    scene.step()


def hit(scene, handle, prompt, **request):
    """How many tokens the prefix cache gives a new request."""
    scene.add(handle, prompt, **request)
    [new] = scene.step().added
    return new.num_computed_tokens


# Prefix hits


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, 8),
        (PROMPT[:9], 8),
        (PROMPT[:8], 4),  # the last token is always computed: its logits are wanted
        (PROMPT[:4] + [9] * 6, 4),
        ([9] + PROMPT[1:], 0),
        (PROMPT + [1, 2, 3], 8),
    ],
)
def test_full_blocks_of_an_equal_prefix_are_found_again(prompt, expected):
    scene = Scene()
    run_to_its_end(scene, 0, PROMPT)
    assert hit(scene, 1, prompt) == expected


def test_outputs_are_found_again_too():
    scene = Scene()
    scene.add(0, PROMPT, max_tokens=3)
    scene.steps(3)
    assert hit(scene, 1, PROMPT + [TOKEN, TOKEN, 5]) == 12


def test_the_block_of_the_last_token_is_not_found_since_that_has_no_keys_and_values():
    scene = Scene()
    scene.add(0, PROMPT[:6], max_tokens=2)
    scene.steps(2)
    assert hit(scene, 1, [*PROMPT[:6], TOKEN, TOKEN, 5]) == 4


def test_running_requests_share_the_blocks_of_a_hit():
    scene = Scene()
    scene.add(0, PROMPT)
    scene.step()
    assert hit(scene, 1, PROMPT) == 8
    assert scene.blocks(0)[:2] == scene.blocks(1)[:2]


def test_a_prefix_that_is_being_computed_is_waited_for():
    scene = Scene(max_num_batched_tokens=8)
    scene.add(0, PROMPT)
    scene.add(1, PROMPT)
    scene.step()
    assert scene.running == [0], "both would compute the same blocks"
    scene.step()
    assert scene.running == [0, 1]
    assert scene.scheduler.requests[1].num_cached_tokens == 8


@pytest.mark.parametrize("difference", [{"cache_salt": "mine"}, {"adapter": 3}])
def test_salt_and_adapter_keep_prefixes_apart(difference):
    scene = Scene()
    run_to_its_end(scene, 0, PROMPT)
    run_to_its_end(scene, 1, PROMPT, **difference)
    assert hit(scene, 2, PROMPT, **difference) == 8
    assert scene.scheduler.requests[2].num_cached_tokens == 8
    run_to_its_end(scene, 3, PROMPT, cache_salt="yours", adapter=4)
    assert scene.scheduler.counters.prefix_hits == 8


def test_blocks_of_a_step_that_failed_are_not_found():
    scene = Scene()
    scene.add(0, PROMPT)
    scene.step(errors={0: "broken"})
    assert hit(scene, 1, PROMPT) == 0


def test_blocks_are_not_found_before_their_step_has_succeeded():
    scene = Scene()
    scene.add(0, PROMPT)
    scene.plan()
    scene.scheduler.abort(0)
    scene.add(1, PROMPT)
    plan = scene.plan()
    assert plan.added[0].num_computed_tokens == 0


def test_the_least_recently_used_cached_blocks_are_overwritten_first():
    scene = Scene(num_blocks=7, max_len=20)
    run_to_its_end(scene, 0, [1, 1, 1, 1, 5])
    run_to_its_end(scene, 1, [2, 2, 2, 2, 5])
    run_to_its_end(scene, 2, 17)  # takes the four that hold nothing, and one more
    assert hit(scene, 3, [2, 2, 2, 2, 5]) == 4
    assert hit(scene, 4, [1, 1, 1, 1, 5]) == 0


def test_the_cache_can_be_forgotten_but_not_while_blocks_are_in_use():
    scene = Scene()
    scene.add(0, PROMPT)
    scene.step()
    assert not scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scene.waiting == [0]
    assert scene.step().added[0].num_computed_tokens == 0


def test_a_request_can_ask_not_to_read_the_cache():
    scene = Scene()
    run_to_its_end(scene, 0, PROMPT)
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    params.skip_reading_prefix_cache = True
    assert hit(scene, 1, PROMPT, params=params) == 0


# Preemption


def test_when_blocks_run_out_the_request_that_came_last_gives_way():
    scene = Scene(num_blocks=5, max_len=16)
    scene.add(0, 4)
    scene.add(1, 4)
    scene.steps(5)  # two blocks each, all full
    assert scene.num_free == 0
    plan = scene.step()
    assert scene.waiting == [1] and scene.scheduler.counters.num_preemptions == 1
    assert plan.removed and scene.tokens(plan) == {0: 1}


def test_a_preempted_request_keeps_its_output_and_goes_on_where_it_was():
    scene = Scene(num_blocks=5, max_len=16)
    scene.add(0, 4, max_tokens=7)
    scene.add(1, 4, max_tokens=7)
    scene.steps(5)
    assert scene.outputs[1] == [TOKEN] * 5
    scene.steps(2)
    assert scene.ends == {0: "LENGTH"} and scene.waiting == [1]
    [new] = scene.step().added
    assert new.token_ids[4:] == [TOKEN] * 5
    assert new.num_computed_tokens == 4, "of its blocks one was not overwritten"
    scene.step()
    assert scene.ends[1] == "LENGTH" and scene.outputs[1] == [TOKEN] * 7


def test_by_priority_the_largest_number_gives_way():
    scene = Scene(num_blocks=5, max_len=16, policy="priority")
    scene.add(0, 4, priority=2)
    scene.add(1, 4, priority=1)
    scene.steps(6)
    assert scene.waiting == [0]


def test_what_a_preempted_request_had_in_flight_counts_for_nothing():
    scene = Scene(num_blocks=5, max_len=16)
    scene.add(0, 4)
    scene.add(1, 4)
    scene.steps(4)
    last = scene.plan()
    scene.plan()
    assert scene.waiting == [1]
    scene.finish(last)
    assert (len(scene.outputs[0]), len(scene.outputs[1])) == (5, 4)


# Windows and groups


@pytest.mark.parametrize(("window", "num_unread"), [(4, 3), (6, 2), (9, 2), (10, 1)])
def test_blocks_behind_a_window_are_given_back(window, num_unread):
    scene = Scene(groups=(sliding(window),))
    scene.add(0, 4)
    scene.steps(14)  # the last one computes token 16, and reads the window that ends there
    blocks = scene.blocks(0)
    assert blocks[:num_unread] == [NULL_BLOCK] * num_unread
    assert NULL_BLOCK not in blocks[num_unread:]
    assert scene.num_free == 100 - len(blocks[num_unread:])


def test_a_hit_needs_only_what_the_window_reads():
    scene = Scene(groups=(sliding(4),), num_blocks=8)
    run_to_its_end(scene, 0, PROMPT)
    assert hit(scene, 1, PROMPT) == 8
    assert scene.blocks(1)[0] == NULL_BLOCK


def test_all_groups_draw_from_one_pool_and_have_tables_of_their_own():
    scene = Scene(groups=(FULL, sliding(4)))
    scene.add(0, PROMPT)
    [new] = scene.step().added
    full, window = new.block_ids
    assert len(full) == len(window) == 3 and not set(full) & set(window)
    assert scene.num_free == 100 - 6


def test_a_hit_is_as_long_as_every_group_allows():
    scene = Scene(groups=(FULL, KVGroupSpec(block_size=8)))
    run_to_its_end(scene, 0, list(range(14)))
    assert hit(scene, 1, list(range(14))) == 8, "the second group has one full block of 8"


def test_groups_may_have_blocks_of_different_sizes():
    scene = Scene(groups=(FULL, KVGroupSpec(block_size=8)))
    scene.add(0, 7)
    [new] = scene.step().added
    assert [len(table) for table in new.block_ids] == [2, 1]
    grown = [[new.group for new in scene.step().new_blocks] for _ in range(6)]
    assert grown == [[], [0, 1], [], [], [], [0]]
