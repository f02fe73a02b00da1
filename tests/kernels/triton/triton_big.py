"""Triton kernels on tensors of more than 2^31 elements, for test_triton_memory: run in a process of
its own with TRITON_INTERPRET=1; prints JSON: for each check null, or what is wrong.

The memory is address space: pages that nobody touches cost nothing. So only the first programs of a
launch run and the last, on numbers at both ends of a tensor, and the watch sees whether an offset
that passes 2^31 leaves the tensor. Sizes are below 2^32, so that no wrapped offset is inside.
"""

from __future__ import annotations

import json
import mmap
import traceback
from itertools import product

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.triton.attention.paged_kv import PagedKV
from quire.kernels.triton.gates import activate, scale_gate
from quire.kernels.triton.linear.rounding import rounded_rows
from quire.kernels.triton.linear.triton_linear import Pairs, TritonLinear
from quire.kernels.triton.moe.experts import _weighted_sum_kernel
from quire.kernels.triton.norms import add, add_norm
from quire.kernels.triton.sampling.draw import draw, greedy, truncate
from quire.kernels.triton.sampling.edit_logits import bias_logits, forbid_words, penalize
from quire.kernels.triton.sampling.mask_logits import mask_logits
from quire.kernels.triton.sampling.rank import rank
from quire.ops import AttentionArgs, select
from quire.ops.kv import LayerLatents
from quire.ops.norm import NormWeight
from quire.ops.rotary import RotaryTable
from tests.kernels.triton.triton_memory import Watch, corners

NO_RESERVE = 0x4000
"""Of Linux: not in `mmap` before Python 3.13."""
LARGE = 1 << 28
"""Bytes from which an allocation of the kernels' callers is address space too."""

ALLOCATIONS = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like)
HALF, INT8 = torch.float16, torch.int8
ROWS, WIDTH = 450_016, 5_024
"""Logits of very many tokens; a row has two chunks."""


def sparse(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros that take no memory before they are touched."""
    count = int(np.prod([int(n) for n in shape]))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


class Sparse(TorchDispatchMode):
    """While active, large results of torch's allocations take no memory either; `sizes`: bytes of
    all of them.
    """

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket not in ALLOCATIONS:
            return func(*args, **(kwargs or {}))
        shaped = func(*args, **{**(kwargs or {}), "device": "meta"})
        self.sizes.append(shaped.nbytes)
        if shaped.nbytes < LARGE:
            return func(*args, **(kwargs or {}))
        return sparse(*shaped.shape, dtype=shaped.dtype)


def ends(grid, _):
    """The first and the last programs of the first axis, and all of the others."""
    return list(product(sorted({0, grid[0] - 1}), *map(range, grid[1:])))


def noise(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def at_both_ends(rows, width, dtype=torch.float32):
    """A large tensor, and the small one of its first and its last row."""
    small = noise(2, width, dtype=dtype)
    large = sparse(rows, width, dtype=dtype)
    assert 2**31 <= large.numel() < 2**32
    large[0], large[-1] = small
    return large, small


def both(large, small):
    """First and last of something large are all of something small."""
    for one, other in zip(large, small, strict=True):
        assert torch.equal(one[:: len(one) - 1], other), (one[:: len(one) - 1], other)


def kv_pages(blocks, head_dim=128):
    """Large memory and small: block i of the small is block blocks[i] of the large."""
    small = noise(2, len(blocks), 16, 8, head_dim, dtype=HALF)
    large = sparse(2, max(blocks) + 1, 16, 8, head_dim, dtype=HALF)
    assert 2**31 <= large[0].numel() < 2**32
    large[:, blocks] = small
    return PagedKV(large), PagedKV(small)


def attended(ops, kv, query_start, seq_lens, tables):
    """What the queries of a step find."""
    plan = ops.plan_attention(
        query_start=np.array(query_start, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        block_size=16,
        window=None,
    )
    q = noise(query_start[-1], 8, 128, dtype=HALF)
    return ops.attend(q, kv, plan, AttentionArgs(scale=0.1))


def attention_reads_the_last_block():
    blocks = [131_500, 0, 131_499]
    for is_fixed, new in product((True, False), (1, 5)):
        ops = select(device="cpu", dtype=HALF, providers=["triton"], deterministic=is_fixed)
        with Watch():
            found = [
                attended(ops, kv, [0, new], [40], [table])
                for kv, table in zip(kv_pages(blocks), (blocks, [0, 1, 2]), strict=True)
            ]
        assert torch.equal(*found)


def a_prompt_takes_no_room_for_shares_of_keys():
    """Only rows with one new token share theirs among programs: warm-up runs prompts and decodes
    each for themselves, and memory is planned by what it took.
    """
    ops = select(device="cpu", dtype=HALF, providers=["triton"])
    with Sparse() as memory:
        kv = PagedKV(noise(2, 8, 16, 8, 128, dtype=HALF))
        memory.sizes.clear()
        out = attended(ops, kv, [0, 1, 101], [20, 100], [[7, 6] + [0] * 5, list(range(7))])
    assert max(memory.sizes) == out.nbytes


def keys_are_kept_in_the_last_block():
    large, small = kv_pages([131_499, 0])
    ops = select(device="cpu", dtype=HALF, providers=["triton"])
    table = RotaryTable(noise(64, 128), 128, False)
    qkv, positions = noise(2, 24 * 128, dtype=HALF), torch.tensor([[63, 0]])
    for kv, slots in ((large, [131_500 * 16 - 1, 3]), (small, [15, 16 + 3])):
        with Watch():
            ops.rope_store(
                qkv, kv, torch.tensor(slots), positions, heads=8, kv_heads=8, head_dim=128,
                rotary=table, qk_norm=None, clip=None,
            )  # fmt: skip
    assert torch.equal(large.memory[:, [131_499, 0]], small.memory)


def latent_pages(blocks):
    """As `kv_pages`, of latents."""
    small = noise(len(blocks), 16, 576, dtype=HALF)
    large = sparse(max(blocks) + 1, 16, 576, dtype=HALF)
    assert 2**31 <= large.numel() < 2**32
    large[blocks] = small
    return LayerLatents(large, 512), LayerLatents(small, 512)


def latents_of_the_last_block():
    blocks = [233_100, 0, 233_099]
    for is_fixed, new in product((True, False), (1, 5)):
        ops = select(device="cpu", dtype=HALF, providers=["triton"], deterministic=is_fixed)
        q, turned = noise(new, 3, 512, dtype=HALF), noise(new, 3, 64, dtype=HALF)
        found = []
        for latents, table in zip(latent_pages(blocks), (blocks, [0, 1, 2]), strict=True):
            plan = ops.plan_latent(
                query_start=np.array([0, new], dtype=np.int32),
                seq_lens=np.array([40], dtype=np.int32),
                block_table=torch.tensor([table], dtype=torch.int32),
                block_size=16,
            )
            with Watch():
                found.append(ops.latent_attend(q, turned, latents, plan, 0.1))
        assert torch.equal(*found)


def latents_are_kept_in_the_last_block():
    large, small = latent_pages([233_099, 0])
    ops = select(device="cpu", dtype=HALF, providers=["triton"])
    table = RotaryTable(noise(64, 64), 64, True)
    weight = NormWeight("rms", 1e-5, noise(512, dtype=HALF), None)
    q, x, positions = (
        noise(2, 3, 64, dtype=HALF),
        noise(2, 576, dtype=HALF),
        torch.tensor([[63, 0]]),
    )
    for latents, slots in ((large, [233_100 * 16 - 1, 3]), (small, [15, 16 + 3])):
        with Watch():
            ops.latent_store(
                q, x, latents, torch.tensor(slots), positions, norm=weight, rotary=table
            )
    assert torch.equal(large.data[[233_099, 0]], small.data)


def products_of_many_heads():
    rows, heads = 40_000, 128
    ops = select(device="cpu", dtype=HALF, providers=["triton"], deterministic=True)
    w = ops.pack_heads(noise(heads, 512, 16, dtype=HALF))
    x, small = sparse(rows, heads, 16, dtype=HALF), noise(2 * 64, heads, 16, dtype=HALF)
    x[:64], x[-64:] = small.view(2, 64, heads, 16)
    with Watch(corners), Sparse():
        large, y = ops.heads_linear(x, w), ops.heads_linear(small, w)
    assert 2**31 <= large.numel() < 2**32
    kept, ends = [*range(64), *range(-64, 0)], ([0, 0, 127, 127], [0, -1, 0, -1])
    assert torch.equal(large[kept][:, ends[0], ends[1]], y[:, ends[0], ends[1]])


def tokens_of_many_rows():
    large, small = at_both_ends(ROWS, WIDTH)
    with Watch(ends):
        both(greedy(large), greedy(small))
    settings = torch.tensor([0.7, 40.0, 0.9, 0.0], dtype=torch.float64).expand(ROWS, 4)
    keys = torch.tensor([12345, 777], dtype=torch.int32).expand(ROWS, 2)
    hashes = torch.arange(WIDTH, dtype=torch.int32) * 40503
    with Sparse(), Watch(ends):
        both(draw(large, settings, keys, hashes), draw(small, settings[:2], keys[:2], hashes))
        assert torch.equal(truncate(large, settings)[:: ROWS - 1], truncate(small, settings[:2]))
    ids = torch.zeros(ROWS, dtype=torch.int64)
    ids[-1] = WIDTH - 1
    with Watch(ends):
        one, other = rank(large, ids, 2), rank(small, ids[:: ROWS - 1], 2)
    both(*([getattr(x, name) for name in x.__slots__] for x in (one, other)))


def edits_of_the_last_row():
    large, small = at_both_ends(ROWS, WIDTH)
    history = sparse(1100, 2_000_000, dtype=torch.int32)
    history[1099, :5] = torch.tensor([7, WIDTH - 1, 7, 9, WIDTH - 1])
    entries = torch.tensor([[0, WIDTH - 1], [1, 5]], dtype=torch.int32)
    words = torch.tensor([[0, 9, WIDTH - 1, 11], [1, 9, 3, 4]], dtype=torch.int32)
    penalties = torch.tensor([[1.5, 0.5, 0.25]] * 2)
    mask = torch.randint(-(2**31), 2**31, (2, WIDTH // 32), dtype=torch.int32)
    for logits, rows, of_history in ((large, (ROWS - 1, 0), 1099), (small, (1, 0), 1)):
        ids = history if of_history > 1 else history[[0, 1099], :600].contiguous()
        places = torch.tensor([[rows[0], of_history, 1, 5], [rows[1], 0, 1, 5]])
        with Watch():
            bias_logits(logits, places, entries, torch.tensor([0.5, -0.5]))
            penalize(logits, ids[:, :600], places, penalties)
            forbid_words(logits, ids, places, words)
            mask_logits(logits, torch.tensor(rows), mask)
    assert torch.equal(large[:: ROWS - 1], small)


def products_of_many_outputs():
    x, w = noise(2 * 64, 32), noise(2 * 64, 32)
    rows, outputs = 16_384, 151_936
    xs, ws = sparse(rows, 32), sparse(outputs, 32)
    xs[:64], xs[-64:], ws[:64], ws[-64:] = *x.view(2, 64, 32), *w.view(2, 64, 32)
    with Watch(corners), Sparse():
        large = TritonLinear("float", ws, None, 32, is_fixed=True).multiply(xs)
        small = TritonLinear("float", w, None, 32, is_fixed=True).multiply(x)
    kept = [*range(64), *range(-64, 0)]
    assert torch.equal(large[kept][:, kept], small)


def products_with_the_last_expert():
    outputs, inputs, group = 4096, 1024, 32
    tiles = (torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2, 4], dtype=torch.int32))
    x, order = noise(4, inputs, dtype=HALF), torch.arange(4, dtype=torch.int32)
    two_in_one = noise(2, inputs // group // 2, outputs, 2).bfloat16().view(torch.int32)[..., 0]
    for stored, dtype, experts, scales in (
        ("float", HALF, 900, None),
        ("int8", INT8, 900, noise(2, outputs)),
        ("int4", torch.uint8, 1800, two_in_one),
    ):
        width = inputs // 2 if stored == "int4" else inputs
        weights = experts_at_both_ends((noise(2, outputs, width) * 40).to(dtype), experts)
        scales = (None, None) if scales is None else experts_at_both_ends(scales, experts)
        assert 2**31 <= weights[0].numel() < 2**32
        found = []
        for w, s in zip(weights, scales, strict=True):
            linear = TritonLinear(stored, w, None, inputs, s, group * (stored == "int4"))
            rows = linear.tile_rows(2, HALF)
            chosen = torch.tensor([0, len(w) - 1], dtype=torch.int32)
            with Watch(corners):
                y = linear.product(x, pairs=Pairs(order, chosen, *tiles, rows))
            found.append(y[:, [*range(16), *range(-16, 0)]])
        assert torch.equal(*found)


def experts_at_both_ends(small, count):
    """What many experts have and what two have, the first of the many and the last."""
    large = sparse(count, *small.shape[1:], dtype=small.dtype)
    large[0], large[-1] = small
    return large, small


def rows_and_elements():
    rows, width = 150_000, 16_384
    large, small = at_both_ends(rows, width, HALF)
    weight = NormWeight("rms", 1e-5, noise(width, dtype=HALF), None)
    with Watch(corners), Sparse():
        both(add_norm(large, large, weight), add_norm(small, small, weight))
        both(rounded_rows(large), rounded_rows(small))
        for function in (
            lambda x: add(x, x),
            lambda x: activate(x, "silu", gated=False),
            lambda x: activate(x, "silu", gated=True),
            lambda x: scale_gate(x, x),
        ):
            assert all(map(torch.equal, tips(function(large)), tips(function(small))))


def tips(x):
    """What the first program has, and the last, of a kernel that goes by 1024 elements."""
    return x[0, :1024], x[-1, -1024:]


def sum_of_choices():
    top_k, width = 8, 16_384
    tokens = 150_000 // top_k
    large, small = at_both_ends(tokens * top_k, width, HALF)
    large[top_k - 1], large[-top_k] = large[0].clone(), large[-1].clone()
    few = large[[*range(top_k), *range(-top_k, 0)]]
    weights = noise(2, top_k)
    found = []
    for y, count in ((large, tokens), (few, 2)):
        w = weights[:1].expand(count, top_k).contiguous()
        w[-1] = weights[1]
        out = sparse(count, width, dtype=HALF)
        with Watch(corners):
            _weighted_sum_kernel[(count * width // 1024,)](
                y, w, out, count * width, C=width, TOP_K=top_k, BLOCK=1024
            )
        found.append(tips(out))
    assert all(map(torch.equal, *found))


CHECKS = (
    attention_reads_the_last_block,
    a_prompt_takes_no_room_for_shares_of_keys,
    keys_are_kept_in_the_last_block,
    latents_of_the_last_block,
    latents_are_kept_in_the_last_block,
    products_of_many_heads,
    tokens_of_many_rows,
    edits_of_the_last_row,
    products_of_many_outputs,
    products_with_the_last_expert,
    rows_and_elements,
    sum_of_choices,
)


def main() -> None:
    failures = {}
    for check in CHECKS:
        try:
            check()
            failures[check.__name__] = None
        except Exception:
            failures[check.__name__] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
