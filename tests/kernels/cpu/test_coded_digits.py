"""Products of rows in 16 bits with codes of four and eight bits, in whole numbers where a level has
them: what is lost, and what does not change a bit.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from quire.ops import CodedWeight
from quire.ops.formats.row_rounding import RowRounding
from quire.ops.segments import Addend
from tests.kernels.cpu.native_ops import cpu_ops, dtype_id
from tests.support.needs import NATIVE, needs_native
from tests.support.op_cases import coded
from tests.support.op_cases.case import Draw

pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
KERNELS = ("coded", "coded_digits")
HALVES = [torch.bfloat16, torch.float16]
KINDS = [(bits, zeros) for bits in (4, 8) for zeros in (False, True)]
ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 33, 245]
SHAPES = [(8, 1, 8), (40, 33, 16), (136, 65, 32), (640, 70, 128), (100, 31, 64), (391, 40, 64)]
"""Inputs, outputs, group."""
DIGIT = 2.0**-22
"""Of a group's largest magnitude: how much an input may change."""
FLOAT = torch.finfo(torch.float32).eps


def weight_of(shape, bits, zeros, *, order=False):
    width, out, group = shape
    draw = Draw(width + out, torch.float32)
    return coded.coded_weight(draw, out, width, bits, group, zeros=zeros, order=order)


def hostile_rows(width, dtype, rows=245):
    """Rows of very different sizes; among them values a thousand times as large as the others,
    very large and the smallest ones of the dtype, and zeros.
    """
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator)
    x *= (3 * torch.randn(rows, 1, generator=generator)).exp()
    x[:, :: width // 3 + 1] *= 1000
    limits = torch.finfo(dtype)
    largest = min(limits.max / 16, 1e30)  # products are finite in fp32
    x[1], x[2] = 0, x[2] * limits.tiny
    x[3] = limits.smallest_normal * torch.randint(-3, 4, (width,), generator=generator) / 4
    x[4, : width // 2] = largest
    return x.clamp(-largest, largest).to(dtype)


def diagonal(width, bits):
    """A weight of one group whose products are the inputs times its largest number."""
    codes = torch.full((width, width), 1 << (bits - 1), dtype=torch.uint8)
    codes.fill_diagonal_((1 << bits) - 1)
    packed = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    return CodedWeight(bits, width, width, packed, torch.ones(width, 1))


def lost_by_digits(x, weight):
    """How far a product may be from the exact one because inputs become whole numbers."""
    wide, groups = weight.widened().double().abs(), weight.scales.shape[1]
    if weight.order is not None:
        x, wide = x[:, weight.order], wide[:, weight.order]
    missing = 0, groups * weight.group - weight.in_features
    peaks = F.pad(x.double().abs(), missing).unflatten(1, (groups, -1)).amax(2)
    return DIGIT * peaks @ F.pad(wide, missing).unflatten(1, (groups, -1)).sum(2).T


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
@pytest.mark.sharp(when=lambda shape: shape in ((640, 70, 128), (391, 40, 64)))
def test_sums_are_within_the_bound_of_exact_ones(isa, bits, zeros, shape):
    weight = weight_of(shape, bits, zeros, order=shape[0] == 136)
    for dtype in HALVES:
        ops, x = cpu_ops(isa, dtype), hostile_rows(shape[0], dtype)
        sums = ops.linear_partial(x, ops.pack_linear(weight, None)).double()
        wide = weight.widened().double()
        size = x.double().abs() @ wide.abs().T
        limit = lost_by_digits(x, weight) + 4 * FLOAT * size + 2.0**-126 * wide.abs().sum(1)
        assert ((sums - x.double() @ wide.T).abs() <= limit).all()


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_are_not_much_smaller_than_the_largest_are_exact(isa, dtype, bits):
    """Down to 2^-14 of it in bfloat16 and to 2^-11 in float16, which has three bits more."""
    ops, width = cpu_ops(isa, dtype), 128
    weight = diagonal(width, bits)
    span = 14 if dtype is torch.bfloat16 else 11
    least = 2.0**-span / 1.5
    x = torch.logspace(0, torch.tensor(least).log10().item(), width)[None].to(dtype)
    x[0, 1::2] *= -1
    x[x.abs() < 2.0**-span] = 0
    for scale in (1.0, 2.0**-3):
        sums = ops.linear_partial(x * scale, ops.pack_linear(weight, None))
        assert torch.equal(sums, (x * scale).float() * ((1 << (bits - 1)) - 1))


@pytest.mark.parametrize("bits", [4, 8])
def test_lowest_digits_count_in_any_number_of_words(isa, bits):
    """Only small inputs have one; AVX2 multiplies with those of few words of a group apart."""
    ops, width = cpu_ops(isa, torch.bfloat16), 128
    generator = torch.Generator().manual_seed(bits)
    x = torch.empty(17 * 8, width).uniform_(0.5, 2, generator=generator).to(torch.bfloat16)
    for row in range(17 * 8):
        places = torch.randperm(16, generator=generator)[: row // 8] * 8 + row % 8
        x[row, places] *= 2.0**-10
    packed = ops.pack_linear(diagonal(width, bits), None)
    expected = x.float() * ((1 << (bits - 1)) - 1)
    assert torch.equal(ops.linear_partial(x, packed), expected)
    assert torch.equal(ops.linear_partial(x[24:25], packed), expected[24:25])


@pytest.mark.parametrize("words", range(16))
def test_the_largest_sums_of_lowest_digits_are_right(isa, words):
    """Digits of -128 and codes of 15: what fits into 16 bits decides how many are added there."""
    ops, width = cpu_ops(isa, torch.bfloat16), 128
    x = torch.zeros(1, width)
    x[0, : 8 * words], x[0, -1] = 2.0**-15, 1
    codes = torch.full((40, width // 2), 0xFF, dtype=torch.uint8)
    weight = CodedWeight(4, width, width, codes, torch.ones(40, 1), torch.zeros(40, 1).byte())
    sums = ops.linear_partial(x.to(torch.bfloat16), ops.pack_linear(weight, None))
    assert (sums == 15 * x.sum()).all()


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("top", [0x7F7E00, 0x7F7F00, 0x7F8000, 0xFF0000, 0xFFE000])
def test_the_largest_of_a_group_needs_no_more_than_three_digits(isa, dtype, top):
    """Numbers whose bits are nearly all ones, of either sign."""
    ops, width = cpu_ops(isa, dtype), 128
    x = torch.full((2, width), 2.0**-2)
    x[0, 5], x[1, 5] = top / 2.0**23, -top / 2.0**23
    x = x.to(dtype)
    sums = ops.linear_partial(x, ops.pack_linear(diagonal(width, 4), None))
    assert torch.equal(sums, x.float() * 7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
@pytest.mark.sharp(when=lambda shape: shape == (391, 40, 64))
def test_a_row_has_the_same_bits_in_any_company(isa, bits, zeros, shape):
    dtype = HALVES[shape[1] % 2]
    one, two = cpu_ops(isa, dtype, num_threads=1), cpu_ops(isa, dtype, num_threads=2)
    packed, x = one.pack_linear(weight_of(shape, bits, zeros), None), hostile_rows(shape[0], dtype)
    alone = torch.cat([one.linear(x[i : i + 1], packed) for i in range(len(x))])
    for rows in ROWS:
        assert torch.equal(one.linear(x[:rows], packed), alone[:rows])
        assert torch.equal(two.linear(x[len(x) - rows :], packed), alone[len(x) - rows :])


def test_one_row_of_a_wide_weight_has_the_bits_that_it_has_among_others(isa):
    """Wide enough for several panels side by side."""
    ops = cpu_ops(isa, torch.bfloat16)
    for group, bits in ((128, 4), (128, 8), (32, 4)):
        packed = ops.pack_linear(weight_of((256, 4100, group), bits, zeros=True), None)
        x = hostile_rows(256, torch.bfloat16, rows=7)
        together = ops.linear(x, packed)
        for rows in (1, 2):
            assert torch.equal(ops.linear(x[:rows], packed), together[:rows])


@pytest.mark.parametrize(("bits", "zeros"), KINDS)
def test_levels_with_digits_give_the_same_bits(bits, zeros):
    """Sums of integers have one value; AVX2 has none of eight bits."""
    reasons = dict(NATIVE.levels())
    levels = ["avx_vnni", "avx512_vnni", *(["avx2"] if bits == 4 else [])]
    usable = [level for level in levels if not reasons[level]]
    if len(usable) < 2:
        pytest.skip("fewer than two such levels run here")
    x = hostile_rows(640, torch.bfloat16)
    for group in (32, 64, 128):
        weight, found = weight_of((640, 70, group), bits, zeros), []
        for level in usable:
            ops = cpu_ops(level, torch.bfloat16)
            found.append(ops.linear_partial(x, ops.pack_linear(weight, None)))
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_that_is_not_finite_has_no_finite_output_and_stays_alone(isa, bits, dtype):
    ops = cpu_ops(isa, dtype)
    packed = ops.pack_linear(weight_of((640, 70, 128), bits, zeros=False), None)
    x = torch.randn(6, 640, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = ops.linear(x, packed)
    x[0, 639], x[2, 300], x[5, 0] = float("nan"), float("inf"), float("-inf")
    for rows in (1, 6):
        y = ops.linear(x[:rows], packed)
        assert not y[0].isfinite().any()
    assert not y[[2, 5]].isfinite().any()
    assert torch.equal(y[[1, 3, 4]], before[[1, 3, 4]])


@pytest.mark.parametrize("zeros", [False, True])
def test_reordered_inputs_are_permuted_inputs(isa, zeros):
    ops = cpu_ops(isa, torch.bfloat16)
    weight = weight_of((640, 70, 128), 4, zeros, order=True)
    x, plain = hostile_rows(640, torch.bfloat16, rows=9), dataclasses.replace(weight, order=None)
    permuted = x[:, weight.order].contiguous()
    expected = ops.linear(permuted, ops.pack_linear(plain, None))
    assert torch.equal(ops.linear(x, ops.pack_linear(weight, None)), expected)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_segments_of_several_workers_add_up_to_the_product(isa, bits, group, rows):
    ops = cpu_ops(isa, torch.bfloat16)
    weight, x = weight_of((1024, 35, group), bits, zeros=True), hostile_rows(1024, torch.bfloat16)
    packed, x = ops.pack_linear(weight, None, segments=4), x[6 : 6 + rows]
    addend = Addend(torch.randn(1, 35), torch.zeros(rows, dtype=torch.int32))
    whole = ops.linear(x, packed, addend)
    for size in (2, 4):
        width = 1024 // size
        parts = [
            ops.linear_partial(
                x[:, start : start + width].contiguous(),
                ops.pack_linear(weight.columns(start, width), None, segments=4 // size),
            )
            for start in range(0, 1024, width)
        ]
        total = ops.linear_total(torch.stack(parts, 1), packed, None, torch.float32)
        assert torch.equal((total + addend.values).to(torch.bfloat16), whole)


def test_rounded_rows_and_rows_of_fp32_keep_their_product(isa):
    """They are summed in fp32 at every level, so AVX-512 and AVX2 give the same bits."""
    reasons = dict(NATIVE.levels())
    if isa == "portable" or reasons["avx2"]:
        pytest.skip(reasons["avx2"] or "it has no fused products")
    weight = weight_of((640, 70, 128), 4, zeros=True)
    rounded = dataclasses.replace(weight, rounding=RowRounding("int8"))
    for dtype, case in ((torch.float32, weight), (torch.bfloat16, rounded)):
        x = hostile_rows(640, dtype, rows=5)
        here, there = (
            ops.linear(x, ops.pack_linear(case, None))
            for ops in (cpu_ops(isa, dtype), cpu_ops("avx2", dtype))
        )
        assert torch.equal(here, there)
