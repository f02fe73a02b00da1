"""The native ops on KV memory against the rules of every provider, at each level."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quire.kernels.cpu import ATTENTION_OPS, KV_OPS
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.ops import select
from tests.support.op_cases import CASES
from tests.support.op_conformance import check

KERNELS = ("attention", "rope_store")
NATIVE, REASON = find_native()
pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason=REASON),
    pytest.mark.usefixtures("one_torch_thread"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOSTILE = [case for case in CASES if case.op in KV_OPS + ATTENTION_OPS and not case.is_bench]


@cache
def cpu_ops(isa, dtype):
    runtime = CpuRuntime(num_threads=2, isa=isa)
    return select(device="cpu", dtype=dtype, providers=["cpu"], runtime=runtime)


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def case_id(case):
    return f"{case.op}/{case.name}"


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype))
