"""The native ops on KV memory against the rules of every provider, at each level."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.kernels.cpu import ATTENTION_OPS, KV_OPS, PROMPT_OPS
from quire.kernels.cpu.runtime import find_native
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id, is_sharp
from tests.support.op_cases import CASES
from tests.support.op_cases.paged import PagedShape
from tests.support.op_cases.token_by_token import token_by_token
from tests.support.op_conformance import check

KERNELS = ("attention", "attention_prompts", "rope_store")
NATIVE, REASON = find_native()
pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason=REASON),
    pytest.mark.usefixtures("one_torch_thread"),
]
OPS = (*KV_OPS, *ATTENTION_OPS, *PROMPT_OPS)
HOSTILE = [case for case in CASES if case.op in OPS and not case.is_bench]


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype))


LONG = ((5, 1100), (1, 9), (70, 75), (9, 520), (2, 513))
CHUNKED = [
    *(token_by_token(window, LONG) for window in (None, 20, 600)),
    token_by_token(None, LONG, PagedShape(6, 1, 33, 16)),
    token_by_token(None, LONG, stored=torch.int8),
]


@pytest.mark.parametrize("case", CHUNKED, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_new_tokens_of_a_request_have_the_bits_of_one_after_the_other(isa, dtype, case):
    check(case, dtype, dataclasses.replace(cpu_ops(isa, dtype), batch_invariant=True))
