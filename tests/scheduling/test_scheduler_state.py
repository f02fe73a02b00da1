"""Recurrent state: a ring of blocks per request, zeroed or copied by the plan; snapshots."""

from quire.scheduling.settings import KVGroupSpec
from tests.scheduling.scene import FULL, STATE, Scene

PROMPT = list(range(100, 110))
"""10 tokens: its last block border is 8."""


def test_a_request_starts_with_a_zeroed_state():
    scene = Scene(groups=(STATE,))
    scene.add(0, 3)
    plan = scene.step()
    [ring] = plan.added[0].block_ids
    assert len(ring) == 2, "a step reads one and writes the other"
    assert plan.zero_blocks == [ring[0]] and plan.copies == []


def test_a_state_does_not_grow_with_the_request():
    scene = Scene(groups=(STATE,))
    scene.add(0, 3)
    assert not any(plan.new_blocks for plan in scene.steps(15))


def test_with_drafts_the_ring_has_a_block_for_the_state_after_each():
    scene = Scene(groups=(STATE,), num_drafts=3)
    scene.add(0, 3)
    assert len(scene.step().added[0].block_ids[0]) == 2 + 3


def test_a_chunk_ends_at_the_last_border_of_a_prompt_and_the_next_plan_copies_the_state():
    scene = Scene(groups=(FULL, STATE))
    scene.add(0, PROMPT)
    first = scene.step()
    assert scene.tokens(first) == {0: 8} and first.copies == []
    ring = scene.blocks(0, group=1)
    second = scene.step()
    assert scene.tokens(second) == {0: 2}
    [(source, target)] = second.copies
    assert source == ring[1], "where the first chunk left it"
    assert target not in ring


def test_an_equal_prompt_starts_from_a_copy_of_the_snapshot():
    scene = Scene(groups=(FULL, STATE))
    scene.add(0, PROMPT, max_tokens=1)
    [(_, snapshot)] = scene.steps(2)[1].copies
    scene.add(1, PROMPT, max_tokens=1)
    plan = scene.step()
    [new] = plan.added
    assert new.num_computed_tokens == 8 and scene.tokens(plan) == {1: 2}
    assert plan.copies == [(snapshot, new.block_ids[1][0])] and plan.zero_blocks == []


def test_without_a_snapshot_there_is_no_hit_even_where_keys_and_values_are_cached():
    scene = Scene(groups=(FULL, STATE))
    scene.add(0, PROMPT, max_tokens=1)
    scene.steps(2)
    scene.add(1, [*PROMPT[:6], 1, 2, 3], max_tokens=1)
    assert scene.step().added[0].num_computed_tokens == 0, "one block is cached, no state after it"


def test_an_equal_prompt_waits_for_a_snapshot_that_is_being_made():
    scene = Scene(groups=(FULL, STATE))
    scene.add(0, PROMPT)
    scene.add(1, PROMPT)
    scene.step()
    assert scene.running == [0]
    scene.steps(2)
    assert scene.scheduler.requests[1].num_cached_tokens == 8


def test_a_snapshot_of_a_step_that_failed_is_not_found():
    scene = Scene(groups=(FULL, STATE))
    scene.add(0, PROMPT)
    scene.step()
    scene.step(errors={0: "broken"})
    scene.add(1, PROMPT)
    assert scene.step().added[0].num_computed_tokens == 0


def test_snapshots_are_overwritten_before_other_cached_blocks():
    scene = Scene(groups=(FULL, STATE), num_blocks=10, max_len=16)
    scene.add(0, PROMPT, max_tokens=1)
    scene.steps(2)
    find = scene.scheduler.memory.pool.find
    keys = scene.scheduler.memory.pool._by_key.copy()
    assert [group for _, group in keys] == [0, 0, 1]
    scene.add(1, 13, max_tokens=1)
    scene.steps(2)  # take four blocks, a ring and a snapshot: the six that hold nothing, and one
    left = [group for key, group in keys if find((key, group)) is not None]
    assert left == [0, 0]


def test_without_a_free_block_there_is_no_snapshot():
    scene = Scene(groups=(STATE,), num_blocks=3)
    scene.add(0, PROMPT, max_tokens=1)
    assert [plan.copies for plan in scene.steps(2)] == [[], []]
    assert scene.ends == {0: "LENGTH"}


def test_without_prefix_caching_prompts_are_not_cut_for_snapshots():
    scene = Scene(groups=(STATE,), shares_blocks=False)
    scene.add(0, PROMPT)
    assert scene.tokens(scene.step()) == {0: 10}


def test_a_resumable_request_that_pauses_starts_over_from_its_snapshot():
    scene = Scene(groups=(FULL, STATE))
    scene.add(0, PROMPT, max_tokens=2, resumable=True)
    scene.steps(3)
    assert scene.running == [], "its state may be that of a later token"
    scene.scheduler.extend(0, [1, 2], resumable=False)
    [new] = scene.step().added
    assert new.num_computed_tokens == 8 and new.num_prompt_tokens == 13


def snapshot_ends(scene, plans):
    """Where the tokens of request 0 stood when its state was copied."""
    ends, computed = [], 0
    for plan in plans:
        if plan.copies:
            ends.append(computed)
        computed += scene.tokens(plan).get(0, 0)
    return ends


def test_a_prompt_has_snapshots_at_intervals_and_at_its_last_border():
    scene = Scene(groups=(FULL, STATE), snapshot_interval=8)
    scene.add(0, 23, max_tokens=1)
    assert snapshot_ends(scene, scene.steps(4)) == [8, 16, 20]


def test_an_interval_ends_at_borders_of_all_groups():
    wide = KVGroupSpec(block_size=12)
    scene = Scene(groups=(wide, STATE), snapshot_interval=8)
    scene.add(0, 40, max_tokens=1)
    assert snapshot_ends(scene, scene.steps(4)) == [12, 24, 36]


def test_a_longer_prompt_starts_from_the_snapshot_of_what_both_begin_with():
    scene = Scene(groups=(FULL, STATE), snapshot_interval=8)
    scene.add(0, [*PROMPT, *range(50, 60)], max_tokens=1)
    scene.steps(4)
    scene.add(1, [*PROMPT, *range(80, 99)], max_tokens=1)
    assert scene.step().added[0].num_computed_tokens == 8


def test_snapshots_beyond_their_share_replace_the_oldest():
    scene = Scene(groups=(FULL, STATE), num_snapshot_blocks=2)
    prompts = [[start, *PROMPT] for start in (1, 2, 3)]
    for handle, prompt in enumerate(prompts):
        scene.add(handle, prompt, max_tokens=1)
        scene.steps(2)
    assert scene.scheduler.memory.pool.num_early == 2
    hits = []
    for handle, prompt in enumerate(prompts, start=3):
        made = scene.add(handle, prompt, max_tokens=1)
        scene.scheduler.memory.find_hit(made)
        hits.append(made.num_hit_tokens)
    assert hits == [0, 8, 8]


def test_without_a_share_there_are_no_snapshots():
    scene = Scene(groups=(STATE,), num_snapshot_blocks=0)
    scene.add(0, PROMPT, max_tokens=1)
    assert [plan.copies for plan in scene.steps(2)] == [[], []]


def test_a_request_goes_on_in_the_snapshot_itself_where_there_is_no_block_for_a_copy():
    scene = Scene(groups=(STATE,), num_blocks=5)
    scene.add(0, PROMPT)
    [(_, snapshot)] = scene.steps(3)[1].copies
    scene.add(1, PROMPT, max_tokens=1)
    plan = scene.step()
    [new] = plan.added
    assert new.num_computed_tokens == 8 and new.block_ids[0][0] == snapshot
    assert plan.copies == [] and plan.zero_blocks == []
    assert scene.scheduler.memory.pool.num_early == 0, "its content is about to change"
