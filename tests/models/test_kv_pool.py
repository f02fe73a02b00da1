"""Which layers share a block table, how large blocks are, and what they leave unused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.models.kv_pool import plan_kv_pool, suited_block_size, token_bytes
from quire.models.layer_memory import KeyValues, Latents, NumberBytes, RecurrentState

BF16 = NumberBytes(2, 2)
SIZE = 32
GLOBAL, LOCAL = KeyValues(2, 512), KeyValues(8, 256, window=1024)  # as in Gemma 4


def plan(memories, number=BF16):
    return plan_kv_pool(memories, SIZE, number)


def shapes(pool):
    return [(g.kind, g.window, g.block_size, len(g.layers)) for g in pool.groups]


def test_layers_of_one_kind_are_one_group_whatever_their_size():
    large, small = KeyValues(8, 128), KeyValues(2, 64)
    pool = plan([small, large, small, large])
    assert shapes(pool) == [("full", None, SIZE, 4)]
    assert pool.groups[0].layers == (1, 3, 0, 2)
    assert pool.block_bytes == SIZE * 2 * 2 * (2 * 8 * 128 + 2 * 2 * 64)
    assert pool.unused(pool.groups[0]) == 0 and pool.describe() == "4 layers full"


def test_a_second_model_s_layers_join_the_groups_of_the_first():
    llama_8b, llama_1b = [KeyValues(8, 128)] * 32, [KeyValues(8, 64)] * 16
    pool = plan(llama_8b + llama_1b)
    assert shapes(pool) == [("full", None, SIZE, 48)]
    assert pool.layer_groups == (0,) * 48
    together = token_bytes(llama_8b, BF16) + token_bytes(llama_1b, BF16)
    assert pool.block_bytes == SIZE * together


def test_smaller_layers_have_more_tokens_in_a_block():
    pool = plan([LOCAL] * 25 + [GLOBAL] * 5)  # 26B-A4B has 25 and 5
    assert shapes(pool) == [("full", None, 64, 5)] + [("sliding", 1024, 32, 5)] * 5
    assert pool.block_bytes == 5 * 32 * 2 * 8 * 256 * 2
    assert [pool.unused(group) for group in pool.groups] == [0] * 6
    assert pool.describe().startswith("5 layers full in blocks of 64 tokens, 5 layers window 1024,")
    assert pool.held_blocks(4096, chunk=1) == 64 + 5 * 33


@pytest.mark.parametrize(
    ("memories", "sizes", "unused"),
    [
        ([KeyValues(3, 64), KeyValues(2, 64, window=9)], [32, 32], [0, 1 / 3]),
        ([KeyValues(5, 64), KeyValues(2, 64, window=9)], [32, 64], [0, 1 / 5]),
        ([KeyValues(32, 64), KeyValues(1, 64, window=9)], [32, 256], [0, 3 / 4]),
        ([KeyValues(1, 64)] * 4 + [KeyValues(1, 64, window=9)] * 5, [32, 32], [1 / 5, 0]),
    ],
    ids=["3 to 2", "5 to 2", "32 to 1", "4 layers and 5"],
)
def test_what_does_not_fill_a_page_is_unused(memories, sizes, unused):
    pool = plan(memories)
    assert [group.block_size for group in pool.groups] == sizes
    assert [pool.unused(group) for group in pool.groups] == pytest.approx(unused)
    assert f"({max(unused):.1%} of a block unused)" in pool.describe()


def test_scales_make_pages_that_are_nearly_full():
    pool = plan([LOCAL, GLOBAL], NumberBytes(2, 1, 4))
    full, sliding = pool.groups
    assert (full.block_size, sliding.block_size) == (64, 32)
    assert pool.block_bytes == 32 * 2 * 8 * (256 + 4)
    assert pool.unused(sliding) == 0 and 0 < pool.unused(full) < 0.01


def test_a_block_of_tokens_is_as_large_as_a_state():
    """Layers like Qwen3-Next's: 3 of 4 have a state, of 32 heads of 128 by 128 in float32."""
    state = RecurrentState(numbers=3 * 8192, wide_numbers=32 * 128 * 128)
    attention = KeyValues(2, 256)
    pool = plan(([state] * 3 + [attention]) * 12)
    assert shapes(pool) == [("full", None, 33 * SIZE, 12)] + [("state", None, SIZE, 12)] * 3
    assert pool.groups[0].layers == tuple(range(3, 48, 4))
    assert pool.block_bytes == 12 * 33 * SIZE * 2 * 2 * 256 * 2
    assert pool.block_bytes >= 12 * state.block_bytes(0, BF16)
    assert pool.unused(pool.groups[0]) == 0 and 0 < pool.unused(pool.groups[1]) < 0.01


def test_states_alone_make_a_pool():
    pool = plan([RecurrentState(wide_numbers=100), RecurrentState(wide_numbers=60)])
    assert shapes(pool) == [("state", None, SIZE, 2)]
    assert pool.block_bytes == 4 * 160
    assert [pool.enough(seqs, 100, 10) for seqs in (1, 4)] == [4, 12], "a quarter for snapshots"


def test_layers_that_keep_nothing_have_a_group_and_no_memory():
    pool = plan([None, KeyValues(1, 8), None])
    assert [(g.kind, g.layers) for g in pool.groups] == [("full", (1,)), ("none", (0, 2))]
    assert pool.layer_groups == (1, 0, 1)
    assert pool.slots == (((0, 1),),) and pool.block_bytes == SIZE * 2 * 8 * 2
    assert plan([None, None]).block_bytes == 0


memories = st.one_of(
    st.builds(
        KeyValues,
        st.integers(1, 9),
        st.sampled_from([1, 8, 64, 96]),
        st.none() | st.sampled_from([1, 5, 40]),
    ),
    st.builds(RecurrentState, st.integers(0, 5000), st.integers(1, 9000)),
    st.none(),
)


@given(st.lists(memories, min_size=1, max_size=30))
def test_every_layer_has_its_place_and_fits(layers):
    number = NumberBytes(2, 1, 4)
    pool = plan(layers, number)
    held = sorted(layer for group in pool.groups for layer in group.layers)
    assert held == list(range(len(layers)))
    for layer, group in enumerate(pool.layer_groups):
        assert layer in pool.groups[group].layers
    assert all(group.block_size % SIZE == 0 for group in pool.groups)
    for group in pool.groups:
        kinds = {(m.kind, m.window) for i in group.layers if (m := layers[i]) is not None}
        assert kinds in (set(), {(group.kind, group.window)})
    in_slots = [layer for slot in pool.slots for _, layer in slot]
    assert sorted(in_slots) == [i for i, memory in enumerate(layers) if memory is not None]
    for slot in pool.slots:
        assert len({group for group, _ in slot}) == len(slot), "a block is one group's"
    for group in pool.groups:
        assert group.kind == "none" or 0 <= pool.unused(group) < 1


def test_latents_have_groups_of_their_own_in_blocks_of_equal_bytes():
    pool = plan([Latents(24, 8), KeyValues(1, 8), Latents(24, 8), KeyValues(1, 8, window=9)])
    assert [(g.kind, g.has_latents, g.layers) for g in pool.groups] == [
        ("full", False, (1,)),
        ("full", True, (0,)),
        ("full", True, (2,)),
        ("sliding", False, (3,)),
    ]
    assert {g.block_size // pool.block_size for g in pool.groups if not g.has_latents} == {2}
    assert all(pool.unused(group) == 0 for group in pool.groups)


@pytest.mark.parametrize(
    ("chunk", "wanted", "size"),
    [(16, 32, 16), (8192, 32, 32), (24, 32, 8), (7, 32, 1), (16, 48, 16)],
)
def test_blocks_are_as_large_as_chunks_of_attention_allow(chunk, wanted, size):
    layers = [KeyValues(2, 64, window=chunk, is_chunked=True), KeyValues(2, 64)]
    assert suited_block_size(layers, wanted, BF16) == size
    assert plan_kv_pool(layers, size, BF16).block_sizes == [size]


def test_second_contents_have_tables_of_one_length_whatever_the_tokens():
    own, cross = KeyValues(8, 64), KeyValues(8, 64, source=1500)  # as in Whisper
    pool = plan([own, cross] * 6)
    assert shapes(pool) == [("full", None, SIZE, 6), ("source", None, SIZE, 6)]
    assert pool.describe() == "6 layers full, 6 layers source of 1500 rows"
    assert [pool.held_blocks(length, chunk=1) for length in (1, 32, 448)] == [48, 48, 61]
    assert token_bytes([own, cross], BF16) == own.token_bytes(BF16)
    assert cross.step_bytes(5, BF16) == 1500 * cross.token_bytes(BF16)
    assert pool.groups[1].spec.kind == "source"
