"""Runs cases of the ops through the Triton kernels in Triton's interpreter, one per line of input.

Triton is told at its first import whether kernels are interpreted. So they are run in a process of
their own, and no other test can notice. A line is `dtype fixed|fast op/name`; the answer is a line
of JSON: null, or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from quire.ops import Facts, bind, select
from quire.ops.cases import CASES
from quire.testing import op_oracle
from quire.testing.op_conformance import check


def run(dtype_name: str, mode: str, case_name: str) -> None:
    """Raise AssertionError if the kernels break a rule on the case."""
    dtype = getattr(torch, dtype_name)
    case = next(case for case in CASES if f"{case.op}/{case.name}" == case_name)
    ops = select(device="cpu", dtype=dtype, providers=["triton"], deterministic=mode == "fixed")
    serving = {choice.op: choice.provider for choice in ops.report()}
    assert serving[case.op] == "triton", f"{serving[case.op]} serves this op"
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    oracle = bind(Facts(torch.device("cpu"), dtype), op_oracle.IMPLEMENTATIONS, ["oracle"])
    check(case, dtype, ops, plain, oracle)


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        try:
            run(*line.split())
            failure = None
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps(failure), flush=True)


if __name__ == "__main__":
    main()
