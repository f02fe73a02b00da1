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

from quire.ops import Ops, select
from tests.kernels.triton.triton_cases import CHUNKED, CODED, CODED_ROUNDED, ROUNDED, WIDE
from tests.kernels.triton.triton_memory import Watch
from tests.support.op_cases import CASES, CODED_CASES, FP8_CASES, Case
from tests.support.op_conformance import check, relative_error, results_of

EXACT = {"mask_logits", "bias_logits", "penalize", "forbid_words"}
"""Ops that round as plain torch does."""


def run(dtype_name: str, mode: str, case_name: str) -> None:
    """Raise AssertionError if the kernels break a rule on the case."""
    dtype = getattr(torch, dtype_name)
    cases = CASES + FP8_CASES + CODED_CASES + ROUNDED + CHUNKED + WIDE + CODED + CODED_ROUNDED
    case = next(case for case in cases if f"{case.op}/{case.name}" == case_name)
    ops = select(device="cpu", dtype=dtype, providers=["triton"], deterministic=mode == "fixed")
    serving = {choice.op: choice.provider for choice in ops.report()}
    assert serving[case.op] == "triton", f"{serving[case.op]} serves this op"
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    if case in ROUNDED + CODED_ROUNDED:
        check_against(plain, case, dtype, ops)
    else:
        check(case, dtype, ops)
    if case.op in EXACT:
        found, wanted = (results_of(case, dtype, by)["0"] for by in (ops, plain))
        assert same_bits(found, wanted), "other bits than plain torch"


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bitwise but for what a NaN carries."""
    both = (
        x.nan_to_num(7.5, float("inf"), float("-inf")).view(torch.int32) for x in (found, wanted)
    )
    return torch.equal(found.isnan(), wanted.isnan()) and torch.equal(*both)


def check_against(plain: Ops, case: Case, dtype: torch.dtype, ops: Ops) -> None:
    """Sums of whole numbers are exact in both; the others differ by the order of addition. Where
    bits may not depend on the batch, some rows must have the same alone.
    """
    found, wanted = results_of(case, dtype, ops), results_of(case, dtype, plain)
    error = relative_error(found["0"], wanted["0"])
    assert error <= 8 * torch.finfo(dtype).eps, f"error {error:.3g}"
    singles = case.prepare(ops, case.draw(dtype)).singles if ops.batch_invariant else ()
    for row in {0, len(singles) // 2, len(singles) - 1} if singles else ():
        alone = case.run(ops, singles[row])
        assert torch.equal(alone[0], found["0"][row]), f"row {row} alone has other bits"


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        try:
            with Watch():
                run(*line.split())
            failure = None
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps(failure), flush=True)


if __name__ == "__main__":
    main()
