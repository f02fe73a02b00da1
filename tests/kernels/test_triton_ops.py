"""The Triton kernels on every case of the ops, in Triton's interpreter.

The interpreter cuts bfloat16 off instead of rounding it, and multiplies its bits as whole numbers,
so there is no bfloat16 here: that is for a GPU to show (tools/gpu_report.py).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quire.ops import Facts, bind, select
from quire.ops.cases import CASES
from quire.testing import op_oracle
from quire.testing.op_conformance import check

launch = pytest.importorskip("quire.kernels.triton.launch")

SLOW = {"ragged", "long", "long-softcap", "int8-ragged", "int8-long-window"}
"""Cases with many programs, each a fraction of a second in the interpreter, that add nothing to
`ragged-all`, `long-window` and `int8-ragged-window`."""

HOSTILE = [case for case in CASES if not case.is_bench and case.name not in SLOW]
KINDS = [(torch.float32, True), (torch.float16, False)]


def triton_ops(dtype, *, deterministic):
    return select(device="cpu", dtype=dtype, providers=["triton"], deterministic=deterministic)


def served(case):
    ops = triton_ops(torch.float32, deterministic=True)
    return {choice.op: choice.provider for choice in ops.report()}[case.op] == "triton"


@pytest.mark.skipif(not launch.is_interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: f"triton-{case.op}/{case.name}")
@pytest.mark.parametrize(("dtype", "deterministic"), KINDS, ids=["float32-fixed", "float16-fast"])
def test_triton_conforms(case, dtype, deterministic):
    if not served(case):
        pytest.skip("plain torch serves this op")
    ops = triton_ops(dtype, deterministic=deterministic)
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    oracle = bind(Facts(torch.device("cpu"), dtype), op_oracle.IMPLEMENTATIONS, ["oracle"])
    check(case, dtype, ops, plain, oracle)
