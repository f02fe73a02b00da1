"""Every op of every provider, on every case: see tests.support.op_conformance for the rules."""

from __future__ import annotations

import pytest
import torch

from quire.ops import Facts, bind, select
from quire.ops.cases import CASES, FP8_CASES
from tests.support import op_oracle
from tests.support.op_conformance import check, relative_error, results_of

HOSTILE = [case for case in CASES + FP8_CASES if not case.is_bench]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROVIDERS = ["torch"]


def oracle_ops(dtype):
    return bind(Facts(torch.device("cpu"), dtype), op_oracle.IMPLEMENTATIONS, ["oracle"])


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def case_id(case):
    return f"{case.op}/{case.name}"


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_provider_conforms(provider, dtype, case):
    ops = select(device="cpu", dtype=dtype, providers=[provider])
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    check(case, dtype, ops, plain, oracle_ops(dtype))


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
def test_definition_equals_the_oracle_in_float64(case):
    plain = select(device="cpu", dtype=torch.float64, providers=["torch"])
    truths = results_of(case, torch.float64, oracle_ops(torch.float64))
    for name, value in results_of(case, torch.float64, plain).items():
        assert relative_error(value, truths[name]) < 1e-13
