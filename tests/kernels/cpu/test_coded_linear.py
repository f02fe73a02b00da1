"""Products with weights in codes, at every level that has code of its own for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.kernels.cpu.runtime import find_native
from quire.ops.formats.coded import CodedLinear
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id
from tests.support.op_cases import coded
from tests.support.op_cases.case import Draw
from tests.support.op_conformance import check

NATIVE, REASON = find_native()
pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason=REASON),
    pytest.mark.usefixtures("one_torch_thread"),
]
KERNELS = ("coded",)
ROWS = [0, 1, 2, 3, 5, 7, 8, 13, 33, 250]
KINDS = [(bits, zeros) for bits in (4, 8) for zeros in (False, True)]
SHAPES = [(8, 1, 8), (40, 33, 16), (136, 65, 32), (640, 70, 128), (100, 31, 64)]
"""Inputs, outputs, group."""


@pytest.mark.parametrize("case", coded.CASES, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, dataclasses.replace(cpu_ops(isa, dtype), batch_invariant=True))


def drawn(shape, bits, zeros):
    width, out, group = shape
    draw = Draw(width + out, torch.float32)
    weight = coded.coded_weight(draw, out, width, bits, group, zeros=zeros)
    return weight, draw.normal(max(ROWS), width)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_products_are_the_definition_and_a_row_has_the_same_bits_in_any_company(
    isa, bits, zeros, shape
):
    one, two = cpu_ops(isa, num_threads=1), cpu_ops(isa, num_threads=2)
    weight, x = drawn(shape, bits, zeros)
    packed = one.pack_linear(weight, None)
    alone = torch.cat([one.linear(x[i : i + 1], packed) for i in range(len(x))])
    truth = CodedLinear(weight, None).multiply(x.double())
    size = x.double().abs() @ weight.widened().double().abs().T
    assert ((alone - truth).abs() <= 4 * torch.finfo(torch.float32).eps * size).all()
    for rows in ROWS:
        assert torch.equal(one.linear(x[:rows], packed), alone[:rows])
        assert torch.equal(two.linear(x[len(x) - rows :], packed), alone[len(x) - rows :])


@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_levels_with_fused_products_give_the_same_bits(bits, zeros):
    levels = dict(NATIVE.levels())
    if levels["avx512"]:
        pytest.skip(levels["avx512"])
    weight, x = drawn((640, 70, 128), bits, zeros)
    found = [
        cpu_ops(isa).linear(x, cpu_ops(isa).pack_linear(weight, None)) for isa in ("avx2", "avx512")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [1, 5])
def test_segments_of_several_workers_add_up_to_the_product(isa, rows):
    ops = cpu_ops(isa)
    weight, x = drawn((1024, 35, 32), 4, zeros=True)
    packed = ops.pack_linear(weight, None, segments=4)
    whole = ops.linear(x[:rows], packed)
    for size in (2, 4):
        width = 1024 // size
        parts = [
            ops.linear_partial(
                x[:rows, start : start + width].contiguous(),
                ops.pack_linear(weight.columns(start, width), None, segments=4 // size),
            )
            for start in range(0, 1024, width)
        ]
        total = ops.linear_total(torch.cat(parts, 1), packed, None, torch.float32)
        assert torch.equal(total, whole)


def test_a_row_that_is_not_finite_stays_alone(isa):
    ops = cpu_ops(isa)
    weight, x = drawn((136, 65, 32), 4, zeros=True)
    packed, x = ops.pack_linear(weight, None), x[:4]
    before = ops.linear(x, packed)
    x[0, 69], x[3, 2] = float("nan"), float("inf")
    y = ops.linear(x, packed)
    assert not y[0].isfinite().any()
    assert torch.equal(y[1:3], before[1:3])


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_id)
def test_memory_is_that_of_the_checkpoint(scales):
    draw = Draw(1, torch.float32)
    ops = cpu_ops(None)
    for bits, zeros in KINDS:
        weight = coded.coded_weight(draw, 64, 256, bits, 64, zeros=zeros, scales=scales)
        assert ops.pack_linear(weight, None).panels.nbytes == weight.nbytes
