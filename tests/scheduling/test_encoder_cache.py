"""Which items of media are encoded in a step, whose rows are kept, and what waits for them."""

import pytest

from quire.errors import RequestError
from quire.scheduling.request import Reason
from quire.step.media import MediaItem
from quire.step.plan import PromptAllowance
from quire.step.result import StepResult
from tests.scheduling.scene import NOTHING, Scene


def item(name, start, num_rows, *, gap=0, is_bidirectional=False):
    places = [(start, start + num_rows)]
    if gap:
        half = start + num_rows // 2
        places = [(start, half), (half + gap, start + num_rows + gap)]
    return MediaItem(name, "image", num_rows, places, {"content": name}, is_bidirectional)


def names(plan):
    return [each.digest for each in plan.encodings]


def test_an_item_is_encoded_with_its_first_chunk_and_kept_until_its_last():
    scene = Scene(encoder_rows=8, max_num_batched_tokens=6)
    scene.add(0, 16, media=[item(b"a", 4, 8)])
    first = scene.step()
    assert names(first) == [b"a"] and scene.tokens(first) == {0: 6}
    assert [(s.start, s.end, s.first_row) for s in first.added[0].embedded] == [(4, 12, 0)]
    assert scene.scheduler.encoders.num_free == 0
    second = scene.step()
    assert names(second) == [] and scene.tokens(second) == {0: 6}
    assert not scene.scheduler.encoders._held[0], "all its tokens there are computed"
    scene.add(1, 16, media=[item(b"b", 0, 8)])
    third = scene.step()
    assert third.dropped_outputs == [b"a"] and names(third) == [b"b"]


def test_a_chunk_ends_before_an_item_that_has_no_room():
    scene = Scene(encoder_rows=8, max_num_batched_tokens=12)
    scene.add(0, 30, media=[item(b"a", 2, 6), item(b"b", 9, 6)])
    first = scene.step()
    assert names(first) == [b"a"] and scene.tokens(first) == {0: 9}
    second = scene.step()
    assert second.dropped_outputs == [b"a"] and names(second) == [b"b"]
    assert scene.tokens(second) == {0: 12}


def test_equal_digests_are_encoded_once_for_all_that_have_them():
    scene = Scene(encoder_rows=8)
    for handle in range(3):
        scene.add(handle, 10, media=[item(b"a", 2, 4)])
    assert names(scene.step()) == [b"a"]
    scene.add(3, 10, media=[item(b"a", 5, 4)])
    assert names(scene.step()) == []
    assert scene.scheduler.encoders.num_hits == 3


def test_streams_wait_for_one_item_at_a_time_unless_several_are_small():
    def begun(num_rows, tokens):
        scene = Scene(encoder_rows=64, max_num_batched_tokens=64, max_num_seqs=8)
        scene.add(0, 2)
        scene.step()
        scene.allowance = PromptAllowance(tokens)
        for handle in (1, 2, 3):
            media = [item(bytes([handle]), 2, num_rows)]
            scene.add(handle, 4 + num_rows, media=media)
        return [len(names(plan)) for plan in scene.steps(8) if plan is not None], scene

    counts, scene = begun(num_rows=16, tokens=12.0)
    assert max(counts) == 1 and sum(counts) == 3
    assert scene.scheduler.encoders.num_encoded == 3
    counts, _ = begun(num_rows=4, tokens=24.0)
    assert counts[0] == 3
    scene = Scene(encoder_rows=64, max_num_batched_tokens=64)
    scene.allowance = PromptAllowance(12.0)
    for handle in range(3):
        scene.add(handle, 20, media=[item(bytes([handle]), 2, 16)])
    assert len(names(scene.step())) == 3, "no stream waits"


def test_equal_ids_with_another_item_share_no_block():
    scene = Scene(encoder_rows=16)
    ids = list(range(12))
    scene.add(0, ids, media=[item(b"a", 4, 4)])
    scene.step()
    scene.add(1, ids, media=[item(b"b", 4, 4)])
    scene.add(2, ids, media=[item(b"a", 4, 4)])
    scene.add(3, ids, media=[item(b"a", 5, 4)])
    added = {new.handle: new.num_computed_tokens for new in scene.step().added}
    assert added == {1: 4, 2: 8, 3: 4}


def test_rows_within_an_item_count_over_the_gaps_between_its_places():
    scene = Scene(encoder_rows=8)
    scene.add(0, 12, media=[item(b"a", 2, 4, gap=2)])
    spans = scene.step().added[0].embedded
    assert [(s.start, s.end, s.first_row) for s in spans] == [(2, 4, 0), (6, 8, 2)]


def test_a_bidirectional_item_is_computed_whole():
    scene = Scene(encoder_rows=8, max_num_batched_tokens=10, long_prefill_token_threshold=3)
    scene.add(0, 24, media=[item(b"a", 4, 6, is_bidirectional=True)])
    scene.add(1, 3)
    lengths = [scene.tokens(scene.step())[0] for _ in range(4)]
    assert lengths == [3, 1, 6, 3]


def test_a_prefix_hit_does_not_end_inside_a_bidirectional_item():
    scene = Scene(encoder_rows=8)
    ids = list(range(20))
    whole = [item(b"a", 6, 8, is_bidirectional=True)]
    scene.add(0, ids, media=whole)
    scene.step()
    scene.add(1, ids[:14], media=whole)
    assert scene.step().added[0].num_computed_tokens == 4, "and not 12, inside of the item"
    scene.add(2, ids, media=whole)
    assert scene.step().added[0].num_computed_tokens == 16


def test_the_first_without_room_gets_it_before_those_after_it():
    scene = Scene(encoder_rows=8, max_num_batched_tokens=8)
    scene.add(0, 12, media=[item(b"a", 0, 5)])
    scene.add(1, 12, media=[item(b"b", 0, 8)])
    scene.add(2, 12, media=[item(b"c", 0, 2)])
    scene.add(3, 2)
    assert names(scene.step()) == [b"a"], "b has no room, and c may not take what is left"
    order = [name for _ in range(6) for name in names(scene.step())]
    assert order == [b"b", b"c"]


def test_what_a_running_request_holds_is_not_dropped_and_preemption_lets_go():
    scene = Scene(encoder_rows=6, max_num_batched_tokens=4)
    scene.add(0, 12, media=[item(b"a", 0, 6)])
    scene.step()
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scene.scheduler.encoders._held
    plan = scene.step()
    assert names(plan) == [] and scene.tokens(plan) == {0: 4}, "its rows are still there"


def test_what_is_needed_for_the_next_chunk_is_kept_from_others():
    scene = Scene(encoder_rows=8, max_num_batched_tokens=4)
    scene.add(0, 12, media=[item(b"a", 0, 6)])
    scene.add(1, 12, media=[item(b"b", 0, 6)])
    assert [names(scene.step()) for _ in range(4)] == [[b"a"], [], [], [b"b"]]


def test_an_abort_lets_go_of_rows():
    scene = Scene(encoder_rows=6, max_num_batched_tokens=4)
    scene.add(0, 12, media=[item(b"a", 0, 6)])
    scene.plan()
    scene.scheduler.abort(0)
    scene.add(1, 12, media=[item(b"b", 0, 6)])
    assert names(scene.plan()) == [b"b"]


def test_rows_that_could_not_be_made_are_made_again_for_the_next():
    scene = Scene(encoder_rows=6)
    request = {"media": [item(b"a", 0, 6)], "max_tokens": 2}
    scene.add(0, 8, **request)
    plan = scene.plan()
    result = StepResult(plan.step_id, [1], errors={0: "no"}, failed_encodings=[b"a"])
    scene.scheduler.update(result)
    scene.add(1, 8, **request)
    again = scene.step()
    assert again.dropped_outputs == [b"a"] and names(again) == [b"a"]


def test_new_weights_drop_all_rows():
    scene = Scene(encoder_rows=6)
    scene.add(0, 8, media=[item(b"a", 0, 6)], max_tokens=1)
    scene.step()
    scene.scheduler.change_weights()
    scene.add(1, 8, media=[item(b"a", 0, 6)])
    plan = scene.step()
    assert plan.dropped_outputs == [b"a"] and names(plan) == [b"a"]


REFUSED = {
    "larger than the cache": ({"media": [item(b"a", 0, 7)]}, "7 rows .* do not fit into the 6"),
    "no encoders": ({"media": [item(b"a", 0, 2)]}, "has no encoders for media"),
    "two sizes of one digest": (
        {"media": [item(b"a", 0, 2), item(b"a", 2, 3)]}, "different sizes .* same digest",
    ),
    "beyond the prompt": ({"media": [item(b"a", 8, 4)]}, "one after the other in the prompt"),
    "not in order": (
        {"media": [item(b"a", 4, 2), item(b"b", 2, 2)]}, "one after the other in the prompt",
    ),
    "nowhere": ({"media": [MediaItem(b"a", "image", 0, [])]}, "at no position"),
    "other rows than positions": (
        {"media": [MediaItem(b"a", "image", 3, [(0, 2)])]}, "more or fewer rows than positions",
    ),
    "bidirectional in two ranges": (
        {"media": [MediaItem(b"a", "image", 2, [(0, 1), (2, 3)], {}, True)]}, "more than one range",
    ),
    "bidirectional beyond a step": (
        {"media": [item(b"a", 0, 6, is_bidirectional=True)]}, "do not fit into 5 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_media_that_cannot_be_had_are_refused(name):
    request, text = REFUSED[name]
    rows = 0 if name == "no encoders" else 6
    scene = Scene(encoder_rows=rows, max_num_batched_tokens=5 if "step" in name else 64)
    with pytest.raises(RequestError, match=text):
        scene.add(0, 10, **request)
    encoders = scene.scheduler.encoders
    assert not scene.scheduler.requests and (encoders is None or not encoders._known)


def test_a_prompt_that_is_computed_in_one_step_needs_all_rows_at_once():
    scene = Scene(encoder_rows=6, groups=(NOTHING,))
    media = [item(b"a", 0, 4), item(b"b", 4, 4)]
    with pytest.raises(RequestError, match="8 rows that must be there at once"):
        scene.add(0, 10, max_tokens=1, media=media)
    scene.add(1, 10, max_tokens=1, media=[media[0], item(b"a", 4, 4)])
    assert names(scene.step()) == [b"a"]


def test_deferred_rows_are_waited_for_while_others_go_on():
    scene = Scene(encoder_rows=8, defers_encodings=True)
    scene.add(0, 10, media=[item(b"a", 0, 4)])
    scene.add(1, 3)
    plan = scene.step()
    assert names(plan) == [b"a"] and scene.tokens(plan) == {1: 3}
    assert scene.tokens(scene.step()) == {1: 1}
    scene.scheduler.end_encodings([b"a"], {})
    assert scene.tokens(scene.step()) == {0: 10, 1: 1}


def test_a_deferred_failure_ends_those_that_still_need_the_item():
    scene = Scene(encoder_rows=8, defers_encodings=True)
    scene.add(0, 10, media=[item(b"a", 6, 4)])
    scene.add(1, 10, media=[item(b"b", 6, 4)])
    assert scene.tokens(scene.step()) == {0: 6, 1: 6}, "up to the items"
    out = scene.scheduler.end_encodings([b"b"], {b"a": "it is broken"})
    assert [(end.handle, end.reason, end.message) for end in out.finished] == [
        (0, Reason.ERROR, "it is broken")
    ]
    assert scene.tokens(scene.step()) == {1: 4}
