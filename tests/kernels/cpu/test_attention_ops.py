"""The native ops on KV memory against the rules of every provider, at each level."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.attention_ops import AttentionOps
from quire.kernels.cpu.kv_ops import KVOps
from quire.kernels.cpu.prompt_ops import PromptOps
from quire.ops.norm import NormWeight
from quire.ops.rotary import QKNorm, RotaryTable
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id, is_sharp
from tests.support.needs import needs_native
from tests.support.op_cases import CASES
from tests.support.op_cases.paged import PagedShape
from tests.support.op_cases.token_by_token import token_by_token
from tests.support.op_conformance import check

KERNELS = ("attention", "attention_prompts", "rope_store")
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
OPS = (*ops_of(KVOps), *ops_of(AttentionOps), *ops_of(PromptOps))
HOSTILE = [case for case in CASES if case.op in OPS and not case.is_bench]


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype))


LONG = ((5, 1100), (1, 9), (70, 75), (9, 520), (2, 513))
ODD = {(0, 1097): math.nan, (2, 40): math.inf, (2, 71): math.nan, (3, 519): math.nan}
"""A token's values that are not finite reach nothing that does not see the token."""
CHUNKED = [
    *(token_by_token(window, LONG) for window in (None, 20, 600)),
    token_by_token(None, LONG, PagedShape(6, 1, 33, 16)),
    token_by_token(130, LONG, PagedShape(6, 3, 80, 32)),
    token_by_token(None, LONG, stored=torch.int8),
    token_by_token(None, LONG, odd_values=ODD),
    token_by_token(9, LONG, PagedShape(6, 1, 48, 16), odd_values=ODD),
]


@pytest.mark.parametrize("case", CHUNKED, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_new_tokens_of_a_request_have_the_bits_of_one_after_the_other(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype).replace(batch_invariant=True))


@pytest.mark.parametrize("over", ["head", "per_head", "full"])
def test_heads_of_few_tokens_have_the_bits_that_they_have_among_many(isa, over):
    dtype, heads, kv_heads, dim, count = torch.bfloat16, 10, 5, 32, 9
    ops = cpu_ops(isa, dtype)
    torch.manual_seed(0)
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim).to(dtype)
    widths = {"head": [(dim,)] * 2, "per_head": [(heads, dim), (kv_heads, dim)]}.get(
        over, [(heads * dim,), (kv_heads * dim,)]
    )
    weights = [torch.randn(shape).to(dtype) for shape in widths]
    norms = QKNorm(*(NormWeight("rms", 1e-6, weight) for weight in weights), over=over)
    table = RotaryTable(torch.randn(64, dim), dim)

    def stored(runs):
        kv = ops.allocate_kv(4, 16, kv_heads, dim, dtype, device=torch.device("cpu"))
        queries = [
            ops.rope_store(
                qkv[run],
                kv,
                torch.arange(count)[run] + 5,
                torch.arange(count)[None, run] + 40,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                rotary=table,
                qk_norm=norms,
                clip=1.5,
            ).clone()
            for run in runs
        ]
        return torch.cat(queries), ops.export_kv(kv, [0, 1, 2, 3])

    q, kv = stored([slice(0, count)])
    for step in (1, 2, 3):
        few_q, few_kv = stored([slice(i, i + step) for i in range(0, count, step)])
        assert torch.equal(few_q, q) and torch.equal(few_kv, kv)
