"""8-bit floats in the Triton kernels, in Triton's interpreter, for test_triton_fp8: run in a
process of its own with TRITON_INTERPRET=1; prints JSON: for each check null, or what is wrong.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import torch

from quire.kernels.triton.attention.paged_kv import PagedKV
from quire.kernels.triton.linear.rounding import fp8_rows
from quire.ops import AttentionArgs, select
from quire.ops import fp8 as definition
from quire.ops.kv import numbers_and_scales

FP8 = torch.float8_e4m3fn
CODES = torch.arange(256, dtype=torch.int16).to(torch.uint8)
PLAIN = {t: select(device="cpu", dtype=t, providers=["torch"]) for t in (torch.float32, torch.half)}
TRITON = {t: select(device="cpu", dtype=t, providers=["triton"], deterministic=True) for t in PLAIN}


def each_code_is_read_as_torch_reads_it():
    """A query that sees one key has that key's value: code times scale."""
    finite = CODES.where(CODES & 0x7F != 0x7F, 0)  # NaN is never stored
    memory = torch.zeros(2, 1, 1, 1, 256, dtype=torch.uint8)
    memory[1, 0, 0, 0] = finite
    for scale in (1.0, 2.0**-20):
        kv = PagedKV(memory.view(FP8), torch.full((2, 1, 1, 1), scale))
        for dtype, ops in TRITON.items():
            plan = ops.plan_attention(
                query_start=np.array([0, 1], dtype=np.int32),
                seq_lens=np.array([1], dtype=np.int32),
                block_table=torch.zeros(1, 1, dtype=torch.int32),
                block_size=1,
                window=None,
            )
            q = torch.ones(1, 1, 256, dtype=dtype)
            read = ops.attend(q, kv, plan, AttentionArgs(scale=1.0))[0]
            right = (finite.view(FP8).float() * scale).to(dtype)
            assert torch.equal(read, right), (dtype, scale, read[read != right][:5])


def hostile_rows():
    """Rows [11, 1013]: every number of the type, the middles between neighbours and what lies
    beside those, in several scales; then zeros, almost zeros, the largest, a NaN, an infinity.
    """
    grid = CODES[(CODES & 0x7F) != 0x7F].view(FP8).double().sort().values
    middles = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middles.float(), torch.tensor(to)) for to in (-1e9, 1e9)]
    row = torch.cat((grid.float(), middles.float(), *near))
    rows = [row * scale for scale in (1.0, 2.0**-30, 2.0**90, 0.7, 3e-7)]
    noise = torch.randn(6, len(row), generator=torch.Generator().manual_seed(1))
    noise[0], noise[1] = 0, 1e-33
    noise[2, ::7] = 3e38
    noise[3, 200], noise[4, 300] = float("nan"), float("-inf")
    return torch.cat((torch.stack(rows), noise))


def same(numbers, scales, other_numbers, other_scales):
    """The same scales, NaN included, and the same numbers where a scale is one."""
    known = ~scales.isnan()
    return torch.equal(scales.nan_to_num(-1), other_scales.nan_to_num(-1)) and torch.equal(
        numbers[known].float(), other_numbers[known].float()
    )


def rows_are_rounded_as_torch_casts():
    x = hostile_rows()
    numbers, scales = definition.fp8_rows(x)
    found = fp8_rows(x)
    assert same(*found, numbers, scales.squeeze(-1))
    assert scales[-4:-1].isfinite().sum() == 1
    assert numbers.float().abs().amax() == 448


def the_cache_has_the_bytes_of_the_definition():
    """Two KV heads, of which each has a scale, or all have those of a checkpoint."""
    for dtype, fixed in itertools.product(PLAIN, (None, (0.5, 0.013), (3e-4, 7.0))):
        x = hostile_rows()[:, : 6 * 40].to(dtype)
        x[0, : 6 * 40] = torch.linspace(-3, 3, 6 * 40).to(dtype)
        stored = []
        for ops in (PLAIN[dtype], TRITON[dtype]):
            kv = ops.allocate_kv(5, 8, 2, 40, FP8)
            ops.zero_kv(kv, range(5))
            slots = torch.arange(len(x)) * 2 + 3
            ops.rope_store(
                x, kv, slots, torch.zeros((1, len(x)), dtype=torch.int64), heads=2, kv_heads=2,
                head_dim=40, rotary=None, qk_norm=None, clip=None, kv_scales=fixed,
            )  # fmt: skip
            stored.append(ops.export_kv(kv, range(5)))
        assert stored[0].dtype is FP8 and stored[0].shape == (5, 2, 8, 2, 44)
        plain, found = (numbers_and_scales(data, FP8) for data in stored)
        assert same(*plain, *found)
        if fixed is not None:
            scales = plain[1].transpose(0, 1)
            known = scales.isfinite()
            right = torch.tensor(fixed).view(2, 1, 1, 1).expand(scales.shape)
            assert torch.equal(scales[known & (scales > 0)], right[known & (scales > 0)])
        assert plain[1].isnan().any() and plain[1].isfinite().sum() > 100


def blocks_go_from_one_provider_to_the_other_unchanged():
    plain, triton = PLAIN[torch.half], TRITON[torch.half]
    data = torch.randn(4, 2, 8, 2, 40, generator=torch.Generator().manual_seed(2))
    kv, other = (ops.allocate_kv(4, 8, 2, 40, FP8) for ops in (plain, triton))
    plain.import_kv(kv, range(4), data)
    neutral = plain.export_kv(kv, range(4))
    triton.import_kv(other, [3, 2, 1, 0], neutral)
    triton.copy_kv(other, [0, 3], [3, 0])
    back = triton.export_kv(other, [0, 2, 1, 3])
    assert torch.equal(back.view(torch.uint8), neutral.view(torch.uint8))
    stored = other.memory.nbytes + other.scales.nbytes
    assert stored == data.numel() + data.numel() // 40 * 4
    triton.zero_kv(other, [1])
    assert not triton.export_kv(other, [1]).view(torch.uint8).any()


def the_loss_is_that_of_three_bits():
    """Nothing but numbers times scales: each value is near what was stored."""
    ops = TRITON[torch.float32]
    data = torch.randn(2, 2, 8, 2, 40, generator=torch.Generator().manual_seed(3))
    kv = ops.allocate_kv(2, 8, 2, 40, FP8)
    ops.import_kv(kv, range(2), data)
    numbers, scales = numbers_and_scales(ops.export_kv(kv, range(2)), FP8)
    error = (numbers.float() * scales.unsqueeze(-1) - data).abs()
    floor = data.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    assert (error <= 1.001 * torch.maximum(data.abs() / 16, floor)).all()


CHECKS = (
    each_code_is_read_as_torch_reads_it,
    rows_are_rounded_as_torch_casts,
    the_cache_has_the_bytes_of_the_definition,
    blocks_go_from_one_provider_to_the_other_unchanged,
    the_loss_is_that_of_three_bits,
)


def main():
    failures = {}
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            failures[check.__name__] = f"{type(error).__name__}: {error}"
        else:
            failures[check.__name__] = None
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
