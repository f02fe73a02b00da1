"""The native ops of latent attention against the rules of every provider, at each level."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.latent_ops import LatentOps
from quire.ops import NormWeight
from quire.ops.kv import LatentShape
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id, is_sharp
from tests.support.needs import needs_native
from tests.support.op_cases import CASES
from tests.support.op_cases.latent import ODD, WIDE, Sizes, token_by_token
from tests.support.op_conformance import check

KERNELS = ("latent", "linear")
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
HOSTILE = [case for case in CASES if case.op in ops_of(LatentOps) and not case.is_bench]


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype))


CHUNKED = [token_by_token(s) for s in (WIDE, ODD, Sizes(130, 16, 8, 16), Sizes(1, 33, 2, 4))]


@pytest.mark.parametrize("case", CHUNKED, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_new_tokens_of_a_request_have_the_bits_of_one_after_the_other(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype).replace(batch_invariant=True))


@pytest.mark.parametrize("shape", [(4, 128, 96), (3, 33, 70), (1, 1, 1), (16, 64, 512)])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rows_of_heads_have_the_same_bits_in_any_number(isa, dtype, shape):
    heads, width, out = shape
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(heads, out, width, generator=generator).to(dtype)
    x = torch.randn(250, heads, width, generator=generator).to(dtype)
    ops, alone = cpu_ops(isa, dtype), cpu_ops(isa, dtype, 1)
    packed, other = ops.pack_heads(weight), alone.pack_heads(weight)
    whole = ops.heads_linear(x, packed)
    for rows in (1, 2, 3, 7, 13, 130):
        assert torch.equal(alone.heads_linear(x[:rows], other), whole[:rows])
    head = ops.linear(x[:, 0], ops.pack_linear(weight[0], None))
    assert torch.equal(head, whole[:, 0])


def test_what_lies_outside_is_refused():
    ops = cpu_ops(None, torch.float32)
    [latents] = ops.allocate_shared_kv(3, [LatentShape(4, 8, 4)], torch.float32)
    q, x = torch.zeros(1, 2, 4), torch.zeros(1, 12)
    norm = NormWeight("rms", 1e-6, torch.ones(8))
    for slot in (12, -2):
        with pytest.raises(IndexError):
            ops.latent_store(
                q, x, latents, torch.tensor([slot]), torch.tensor([[0]]), norm=norm, rotary=None
            )
    plan = ops.plan_latent(
        query_start=torch.tensor([0, 1], dtype=torch.int32).numpy(),
        seq_lens=torch.tensor([1], dtype=torch.int32).numpy(),
        block_table=torch.tensor([[3]], dtype=torch.int32),
        block_size=4,
    )
    with pytest.raises(IndexError):
        ops.latent_attend(torch.zeros(1, 2, 8), q, latents, plan, 1.0)
