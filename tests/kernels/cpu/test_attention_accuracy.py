"""How far attention over long contexts is from float64, beside torch's own in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.ops import AttentionArgs
from tests.kernels.cpu.native_ops import cpu_ops
from tests.support.needs import needs_native

KERNELS = ("attention",)
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 32
NEW = 4
SCORES = {"flat": 0.02, "normal": 1.0, "peaked": 6.0}
"""Standard deviations of the scores: every key counts alike, or a few of them alone."""


def drawn(length: int, deviation: float) -> tuple[torch.Tensor, ...]:
    """q [T, H, D], k and v [L, K, D] in bfloat16; values have a mean, which must not drown."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(NEW, HEADS, DIM, generator=generator) * deviation
    k = torch.randn(length, KV_HEADS, DIM, generator=generator)
    v = torch.randn(length, KV_HEADS, DIM, generator=generator) + 0.1
    return tuple(x.bfloat16() for x in (q, k, v))


def of_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last NEW tokens [T, H*D] with torch, in the type of its arguments."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = torch.ones(NEW, k.shape[2], dtype=torch.bool).tril(k.shape[2] - NEW)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=DIM**-0.5, enable_gqa=True)
    return y[0].transpose(0, 1).flatten(1)


def of_kernel(
    isa: str, dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The same with the native kernels, over KV memory of a type."""
    ops, length = cpu_ops(isa, torch.bfloat16), len(k)
    num_blocks = length // BLOCK
    kv = ops.allocate_kv(num_blocks, BLOCK, KV_HEADS, DIM, dtype, device=torch.device("cpu"))
    data = torch.stack((k, v)).view(2, num_blocks, BLOCK, KV_HEADS, DIM).transpose(0, 1)
    ops.import_kv(kv, range(num_blocks), data)
    plan = ops.plan_attention(
        query_start=np.array([0, NEW], dtype=np.int32),
        seq_lens=np.array([length], dtype=np.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        block_size=BLOCK,
        window=None,
    )
    return ops.attend(q, kv, plan, AttentionArgs(DIM**-0.5))


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    """Root of the mean square of differences."""
    return float((y.double() - truth).square().mean().sqrt())


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("length", [4096, 16384, 65536])
def test_errors_are_at_most_twice_those_of_torch_in_bfloat16(isa, length, scores):
    q, k, v = drawn(length, SCORES[scores])
    truth = of_torch(*(x.double() for x in (q, k, v)))
    allowed = 2 * error(of_torch(q, k, v), truth)
    assert error(of_kernel(isa, torch.bfloat16, q, k, v), truth) <= allowed


@pytest.mark.parametrize("scores", SCORES)
def test_int8_memory_costs_no_more_than_its_own_rounding(isa, scores):
    """Beside torch's attention in bfloat16 over the numbers that the memory stands for."""
    length = 4096
    q, k, v = drawn(length, SCORES[scores])
    scale = [x.float().abs().amax(-1, keepdim=True) / 127 for x in (k, v)]
    held = [
        (x.float() / s).round().double() * s.double() for x, s in zip((k, v), scale, strict=True)
    ]
    truth = of_torch(q.double(), *held)
    allowed = 2 * error(of_torch(q, *(x.bfloat16() for x in held)), truth)
    assert error(of_kernel(isa, torch.int8, q, k, v), truth) <= allowed
