"""Requests with a second content: when its keys and values are written, and who reads them."""

import pytest

from quire.errors import RequestError
from quire.scheduling.settings import KVGroupSpec
from quire.step.media import MediaItem, Source
from tests.scheduling.scene import FULL, Scene

GROUPS = (FULL, KVGroupSpec("source"))


def source(name=b"a", num_rows=6):
    return MediaItem(name, "text", num_rows, [], {"content": name})


def scene(**config):
    return Scene(**{"groups": GROUPS, "encoder_rows": 20} | config)


def names(plan):
    return [each.digest for each in plan.encodings]


def written(plan):
    return [new.source.is_written for new in plan.added]


def test_a_source_is_written_with_the_first_chunk_and_its_blocks_never_grow():
    stage = scene(max_num_batched_tokens=4)
    request = stage.add(0, 9, media=[source()])
    first = stage.step()
    assert names(first) == [b"a"] and first.added[0].source == Source(b"a", 6, is_written=False)
    assert [len(table) for table in first.added[0].block_ids] == [1, 2]
    assert not stage.scheduler.encoders._held[0], "its rows are not needed any more"
    for _ in range(8):
        assert not names(stage.step())
    assert [len(table) for table in request.block_ids] == [4, 2]


def test_requests_with_one_source_write_it_once():
    stage = scene()
    stage.add(0, 3, media=[source()])
    stage.add(1, 5, media=[source()])
    assert written(stage.step()) == [False]
    assert stage.waiting == [1], "it waits for the step that writes"
    second = stage.step()
    assert written(second) == [True] and names(second) == []
    tables = [stage.scheduler.requests[handle].block_ids[1] for handle in (0, 1)]
    assert tables[0] == tables[1]


def test_equal_prompts_to_different_sources_share_no_block():
    stage = scene()
    for handle, name in enumerate((b"a", b"b", b"a")):
        stage.add(handle, [5] * 9, media=[source(name)], max_tokens=1)
        plan = stage.step()
        hit = 8 if handle == 2 else 0
        assert plan.added[0].num_computed_tokens == hit and written(plan) == [hit > 0]


def test_without_a_prefix_cache_each_request_writes_its_own():
    stage = scene(shares_blocks=False)
    for handle in range(2):
        stage.add(handle, 3, media=[source()])
    assert written(stage.step()) == [False, False]


def test_a_preempted_request_reads_what_it_has_written_if_it_is_still_there():
    stage = scene(num_blocks=8, max_len=20)
    stage.add(0, 7, media=[source()])
    stage.add(1, 7, media=[source(b"b", 4)])
    stage.step()
    while not stage.waiting:
        stage.step()
    assert stage.waiting == [1]
    stage.scheduler.abort(0)
    assert written(stage.step()) == [True]


def test_what_a_failed_step_has_written_is_not_found():
    stage = scene()
    stage.add(0, 3, media=[source()])
    plan = stage.plan()
    stage.finish(plan, errors={plan.added[0].row: "injected"})
    assert stage.ends == {0: "ERROR"}
    stage.add(1, 3, media=[source()])
    assert written(stage.step()) == [False]


def test_blocks_of_sources_count_when_a_request_is_admitted():
    stage = scene(num_blocks=6, max_len=8)
    stage.add(0, 3, media=[source(num_rows=8)], max_tokens=1)
    stage.add(1, 3, media=[source(b"b", 12)], max_tokens=1)
    stage.step()
    assert stage.waiting == [1], "3 + 1 blocks, where 2 are free"
    with pytest.raises(RequestError, match="needs 6 KV blocks, the cache has 5"):
        stage.add(2, 3, media=[source(b"c", 20)], max_tokens=1)


@pytest.mark.parametrize(("media", "given"), [([], 0), ([source(), source(b"b")], 2)])
def test_a_model_that_reads_a_source_is_given_one(media, given):
    with pytest.raises(RequestError, match=f"reads one second content, not {given}"):
        scene().add(0, 3, media=media)


def test_a_model_without_cross_attention_takes_no_source():
    with pytest.raises(RequestError, match="stands at no position of the prompt"):
        scene(groups=(FULL,)).add(0, 3, media=[source()])


def test_rows_of_a_source_and_of_an_item_at_the_start_must_fit_together():
    items = [MediaItem(b"i", "image", 5, [(0, 5)]), source(num_rows=4)]
    with pytest.raises(RequestError, match="media of 9 rows that must be there at once"):
        scene(encoder_rows=8).add(0, 7, media=items)
