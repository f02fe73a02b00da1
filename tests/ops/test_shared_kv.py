"""Memory that several layers share: a block belongs to one of them at a time."""

from __future__ import annotations

import pytest
import torch

from quire.hardware.native import find_native
from quire.kernels.triton.attention import paged_kv
from quire.ops import select
from quire.ops.kv import (
    KVShape,
    LatentShape,
    LayerLatents,
    LayerState,
    StateShape,
    copy_kv,
    page_bytes,
    zero_kv,
)

NATIVE, REASON = find_native()
CPU = torch.device("cpu")
SHAPES = [
    KVShape(4, 2, 24), KVShape(8, 1, 24), StateShape(700), KVShape(4, 3, 8), StateShape(2000)
]  # fmt: skip
"""Of equal size, smaller with as many tokens, and states below and above the blocks of tokens."""
NUM_BLOCKS = 7


class Triton:
    """The Triton provider's ops on KV memory, which need no GPU."""

    def __init__(self):
        for name in ("export_kv", "import_kv"):
            setattr(self, name, getattr(paged_kv, name))
        self.copy_kv, self.zero_kv = copy_kv, zero_kv

    def allocate_shared_kv(self, num_blocks, shapes, dtype):
        return paged_kv.allocate_shared_kv(num_blocks, shapes, dtype, device=CPU)


def ops_of(provider):
    if provider == "triton":
        return Triton()
    if provider == "cpu" and NATIVE is None:
        pytest.skip(REASON)
    return select(device="cpu", dtype=torch.float32, providers=[provider])


providers = pytest.mark.parametrize("provider", ["torch", "cpu", "triton"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])


@providers
@dtypes
def test_block_0_has_zeros(provider, dtype, monkeypatch):
    """Padding reads it."""
    plain = torch.empty

    def dirty(*args, **kwargs):
        made = plain(*args, **kwargs)
        made.view(torch.uint8).fill_(255)
        return made

    ops = ops_of(provider)
    monkeypatch.setattr(torch, "empty", dirty)
    views = ops.allocate_shared_kv(NUM_BLOCKS, SHAPES, dtype)
    if provider == "triton":
        views = [*views, paged_kv.allocate_kv(NUM_BLOCKS, 4, 2, 24, dtype, device=CPU)]
    else:
        views = [*views, ops.allocate_kv(NUM_BLOCKS, 4, 2, 24, dtype)]
    for view in views:
        assert not any(part[0].view(torch.uint8).any() for part in view.parts)


def contents(shape, dtype, seed):
    """Of one block, in the form in which it comes out again."""
    draw = torch.Generator().manual_seed(seed)
    if isinstance(shape, StateShape):
        return torch.randint(0, 256, (1, shape.num_bytes), dtype=torch.uint8, generator=draw)
    size = (1, 2, shape.block_size, shape.kv_heads, shape.head_dim)
    if dtype is not torch.int8:
        return torch.randn(size, generator=draw).to(dtype)
    numbers = torch.randint(-127, 128, size, dtype=torch.int8, generator=draw)
    scales = torch.rand(size[:-1], generator=draw).unsqueeze(-1).view(torch.int8)
    return torch.cat((numbers, scales), -1)


def write(ops, view, block, data):
    if isinstance(view, LayerState):
        view.data[block] = data[0]
    else:
        ops.import_kv(view, [block], data)


def read(ops, view, block):
    if isinstance(view, LayerState):
        return view.data[block : block + 1].clone()
    return ops.export_kv(view, [block])


def filled(ops, dtype):
    """Views, and what each block holds: (view, contents), blocks of all kinds side by side."""
    views = ops.allocate_shared_kv(NUM_BLOCKS, SHAPES, dtype)
    held = []
    for block in range(NUM_BLOCKS):
        which = block % len(SHAPES)
        data = contents(SHAPES[which], dtype, seed=block)
        held.append((views[which], data))
        write(ops, views[which], block, data)
    return views, held


def check_blocks(ops, held):
    for block, (view, data) in enumerate(held):
        assert torch.equal(read(ops, view, block), data), f"block {block}"


@providers
@dtypes
def test_blocks_of_different_layers_do_not_touch_each_other(provider, dtype):
    ops = ops_of(provider)
    views, held = filled(ops, dtype)
    check_blocks(ops, held)
    for block in (6, 0, 3):  # blocks that change hands
        view = views[(block + 2) % len(SHAPES)]
        data = contents(SHAPES[(block + 2) % len(SHAPES)], dtype, seed=100 + block)
        write(ops, view, block, data)
        held[block] = (view, data)
        check_blocks(ops, held)


@providers
@dtypes
def test_blocks_of_every_kind_are_copied_and_zeroed(provider, dtype):
    ops = ops_of(provider)
    views, held = filled(ops, dtype)
    for source, view in ((0, views[0]), (1, views[1]), (2, views[2]), (4, views[4])):
        ops.copy_kv(view, [source], [6])
        held[6] = (view, held[source][1])
        check_blocks(ops, held)
        ops.zero_kv(view, [6])
        assert not read(ops, view, 6).any()
    held[6] = (views[4], torch.zeros(1, 2000, dtype=torch.uint8))
    check_blocks(ops, held)


@providers
def test_latents_share_pages_with_what_is_larger(provider):
    ops = ops_of(provider)
    shapes = [LatentShape(4, 20, 8), KVShape(4, 3, 8), StateShape(2000)]
    latents, kv, state = ops.allocate_shared_kv(5, shapes, torch.float32)
    assert isinstance(latents, LayerLatents)
    assert latents.data.shape == (5, 4, 28) and latents.rank == 20
    state.data.fill_(1)
    ops.import_kv(kv, [3], torch.full((1, 2, 4, 3, 8), 7.0))
    latents.data[1:3] = torch.arange(2 * 4 * 28.0).view(2, 4, 28)
    ops.copy_kv(latents, [1, 2], [2, 0])
    assert torch.equal(latents.data[2], torch.arange(4 * 28.0).view(4, 28))
    assert torch.equal(latents.data[0], torch.arange(4 * 28.0, 8 * 28.0).view(4, 28))
    ops.zero_kv(latents, [2])
    assert not latents.data[2].any() and (state.data[4] == 1).all()
    assert (ops.export_kv(kv, [3]) == 7).all()


@providers
def test_states_are_read_before_any_is_written(provider):
    ops = ops_of(provider)
    [state] = ops.allocate_shared_kv(5, [StateShape(300)], torch.float32)
    rows = torch.stack([contents(StateShape(300), torch.uint8, seed)[0] for seed in range(5)])
    state.data.copy_(rows)
    ops.copy_kv(state, [0, 1, 2], [1, 2, 0])
    assert torch.equal(state.data, rows[[2, 0, 1, 3, 4]])
    ops.zero_kv(state, [4, 1])
    assert torch.equal(state.data.any(1), torch.tensor([True, False, True, True, False]))


@providers
def test_states_hold_numbers_of_any_type(provider):
    """A layer sees its part of a state as float32, its strides in whole numbers."""
    ops = ops_of(provider)
    _, state = ops.allocate_shared_kv(3, [KVShape(4, 3, 8), StateShape(700)], torch.bfloat16)
    numbers = state.data[:, :400].view(torch.float32)
    numbers.copy_(torch.arange(300.0).view(3, 100))
    assert numbers[2, 99] == 299 and state.data.data_ptr() % 4 == 0


def test_a_page_is_a_multiple_of_what_every_block_needs():
    assert page_bytes([1000, 900], [96]) == 1152 and page_bytes([64]) == 64
    views = ops_of("torch").allocate_shared_kv(NUM_BLOCKS, SHAPES[:2], torch.float32)
    assert views[0].lanes.data_ptr() != views[1].lanes.data_ptr()  # lane 0 of each ends there
    assert views[0].k.data_ptr() == views[1].k.data_ptr()
