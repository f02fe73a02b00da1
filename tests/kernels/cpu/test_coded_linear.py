"""Products with weights in codes, at every level that has code of its own for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.ops import CodedWeight
from quire.ops.formats.coded import CodedLinear
from quire.ops.formats.row_rounding import RowRounding
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id, is_sharp
from tests.support.needs import NATIVE, needs_native
from tests.support.op_cases import coded
from tests.support.op_cases.case import Draw
from tests.support.op_conformance import check

pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
KERNELS = ("coded", "coded_digits")
HOSTILE = [case for case in coded.CASES if not case.is_bench]
ROWS = [0, 1, 2, 3, 5, 7, 8, 13, 33, 250]
KINDS = [(bits, zeros) for bits in (4, 8) for zeros in (False, True)]
OTHERS = [("floats", False), ("table", False)]
ROUNDINGS = [RowRounding(to, *how) for to in ("e4m3", "int8") for how in ((), (24,), (0, 0.0123))]
SHAPES = [(8, 1, 8), (40, 33, 16), (136, 65, 32), (640, 70, 128), (100, 31, 64)]
"""Inputs, outputs, group."""


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype).replace(batch_invariant=True))


def drawn(shape, bits, zeros):
    width, out, group = shape
    draw = Draw(width + out, torch.float32)
    how = {"floats": {"bits": 8, "floats": True}, "table": {"table": coded.TABLE}}
    given = how.get(bits, {"bits": bits})
    weight = coded.coded_weight(draw, out, width, group=group, zeros=zeros, **given)
    return weight, draw.normal(max(ROWS), width)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "zeros"), KINDS + OTHERS)
@pytest.mark.sharp(when=lambda shape: shape in ((40, 33, 16), (100, 31, 64)))
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


@pytest.mark.parametrize(("bits", "zeros"), KINDS + OTHERS)
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
        total = ops.linear_total(torch.stack(parts, 1), packed, None, torch.float32)
        assert torch.equal(total, whole)


def identity(width, rounding):
    """A weight whose products are the rounded rows themselves."""
    codes = torch.full((width, width), 128, dtype=torch.uint8).fill_diagonal_(129)
    scales = torch.ones(width, -(-width // 8))
    return CodedWeight(8, width, 8, codes, scales, rounding=rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("width", [8, 100])
def test_rounded_rows_are_those_of_the_definition(isa, rounding, width):
    ops = cpu_ops(isa)
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(1))
    x = torch.cat((x, x.exp() ** 3, torch.linspace(-6, 6, 40 * width).view(40, -1) * 1e-3))
    x[1], x[2], x[3] = 0, x[2] * 1e-35, x[3] * 1e30
    packed = ops.pack_linear(dataclasses.replace(identity(width, rounding)), None)
    assert torch.equal(ops.linear(x, packed), rounding.rounded(x) + 0.0)
    x[5, 2], x[6, 3] = float("nan"), float("-inf")
    assert torch.equal(ops.linear(x, packed)[:5], rounding.rounded(x)[:5] + 0.0)
    assert ops.linear(x, packed)[5].isnan().any()


def test_parts_of_rounded_rows_have_the_scale_of_the_whole(isa):
    ops, rounding = cpu_ops(isa), RowRounding("e4m3")
    weight, x = drawn((256, 33, 64), "floats", zeros=False)
    weight = dataclasses.replace(weight, rounding=rounding)
    whole, x = ops.linear(x[:5], ops.pack_linear(weight, None, segments=2)), x[:5]
    parts = [
        ops.linear_partial(
            x[:, at : at + 128].contiguous(),
            ops.pack_linear(weight.columns(at, 128), None),
            x.abs().amax(1),
        )
        for at in (0, 128)
    ]
    packed = ops.pack_linear(weight, None, segments=2)
    assert torch.equal(ops.linear_total(torch.stack(parts, 1), packed, None, torch.float32), whole)


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
