"""Plain torch, the definition of every op, on every case: see tests.support.op_conformance for the
rules. In float64 its errors are the oracle's, so that nothing but equal formulas pass.
"""

from __future__ import annotations

import pytest
import torch

from quire.ops import select
from tests.support.op_cases import CASES, CODED_CASES, FP8_CASES, edits, logits, masks, state
from tests.support.op_conformance import check

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HOSTILE = [case for case in CASES + FP8_CASES + CODED_CASES if not case.is_bench]
ON_LOGITS = {case.op for case in masks.CASES + edits.CASES + logits.CASES}
"""Ops whose numbers are in float32 in a model of any type."""

WALKS = {case.op for case in state.CASES}
"""Ops that look at one token at a time, which takes torch long."""

RUNS = [
    pytest.param(
        case, dtype, marks=pytest.mark.full if case.op in WALKS and dtype != torch.float64 else ()
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for case in HOSTILE
    if dtype.itemsize > 2 or case.op not in ON_LOGITS
]


def is_sharp(case, dtype):
    """Formulas in float64, and how numbers are rounded on the way in one other type."""
    if dtype is torch.float64 or case.op in ON_LOGITS:
        return True
    return dtype is case.one_of((torch.float32, torch.bfloat16, torch.float16))


def run_id(value):
    is_dtype = isinstance(value, torch.dtype)
    return str(value).removeprefix("torch.") if is_dtype else f"{value.op}/{value.name}"


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=run_id)
@pytest.mark.sharp(when=is_sharp)
def test_the_definition_conforms(case, dtype):
    check(case, dtype, select(device="cpu", dtype=dtype, providers=["torch"]))
