"""The native masks, which have one code for all levels, against the rules of every provider."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.mask_ops import MaskOps
from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import select
from tests.support.needs import needs_native
from tests.support.op_cases import CASES
from tests.support.op_conformance import check

pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
HOSTILE = [case for case in CASES if case.op in ops_of(MaskOps) and not case.is_bench]


@cache
def native_ops(num_threads=2):
    runtime = CpuRuntime(num_threads=num_threads)
    return select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_native_op_conforms(num_threads, case):
    check(case, torch.float32, native_ops(num_threads))


def test_rows_apart_and_masks_apart():
    """Rows of a wider matrix: nothing between them is touched."""
    wide = torch.zeros(4, 100)
    words = torch.zeros(2, 7, dtype=torch.int32)
    words[:, 2] = -1
    native_ops().mask_logits(wide[:, 3:73], torch.tensor([3, 1]), words[:, 1:4])
    expected = torch.zeros(4, 100)
    expected[[1, 3], 3:35] = -torch.inf
    expected[[1, 3], 67:73] = -torch.inf
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_does_not_exist(row):
    logits = torch.zeros(2, 32)
    with pytest.raises(IndexError):
        native_ops().mask_logits(logits, torch.tensor([row]), torch.zeros(1, 1, dtype=torch.int32))
    assert not logits.any()
