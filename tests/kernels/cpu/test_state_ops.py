"""The native ops of layers with a recurrent state against the rules of every provider, at each
level.
"""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.state_ops import StateOps
from quire.ops import NO_BLOCK
from tests.kernels.cpu import native_ops
from tests.kernels.cpu.native_ops import DTYPES, case_id, dtype_id
from tests.support.needs import NATIVE, needs_native
from tests.support.op_cases import CASES
from tests.support.op_conformance import check, results_of
from tests.support.recurrent.steps import check_token_by_token

KERNELS = ("state",)
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
REFUSALS = dict(NATIVE.levels()) if NATIVE else {}
NO_AVX512 = REFUSALS.get("avx512", "the native module has no code for AVX-512")
WITH_FULL = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in DTYPES[1:])]
HOSTILE = [case for case in CASES if case.op in ops_of(StateOps) and not case.is_bench]
STATEFUL = [case for case in HOSTILE if case.op != "gated_norm" and "5,1,7" in case.name]


def cpu_ops(isa, dtype):
    """The native ops, which claim that a row's bits do not depend on others."""
    return native_ops.cpu_ops(isa, dtype).replace(batch_invariant=True)


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", WITH_FULL, ids=dtype_id)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype))


@pytest.mark.parametrize("case", STATEFUL, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_row_has_the_bits_of_one_token_after_the_other(isa, dtype, case):
    check_token_by_token(case, dtype, cpu_ops(isa, dtype))


@pytest.mark.skipif(bool(NO_AVX512), reason=NO_AVX512)
@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
def test_avx2_and_avx512_give_the_same_bits(case):
    both = [
        results_of(case, torch.bfloat16, cpu_ops(i, torch.bfloat16)) for i in ("avx2", "avx512")
    ]
    for name, value in both[0].items():
        assert torch.equal(value.nan_to_num(7), both[1][name].nan_to_num(7)), name


def test_a_block_that_is_not_there_is_refused():
    ops = cpu_ops(None, torch.float32)
    x, weight = torch.zeros(2, 16), torch.zeros(3, 16)
    states = torch.zeros(4, 2, 16)
    fine, far = torch.tensor([1, NO_BLOCK]), torch.tensor([NO_BLOCK, 4])
    with pytest.raises(IndexError):
        ops.short_conv(x, states, fine, far, weight)
    with pytest.raises(IndexError):  # a step begins with a row
        ops.short_conv(x, states, far.flip(0), fine, weight)
    with pytest.raises(IndexError):
        ops.short_conv(x, states, torch.tensor([NO_BLOCK, 1]), fine, weight)
