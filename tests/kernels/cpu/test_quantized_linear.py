"""Products with weights in int8 and int4: the same integers as the definition, at every level."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.ops import CodedWeight, MoeArgs, RouteArgs, WeightFormat, select
from quire.ops.formats.coded import integer_linear
from quire.ops.formats.row_rounding import RowRounding
from quire.ops.quantized import quantize_rows, quantize_weight
from tests.kernels.cpu.native_ops import DTYPES, cpu_ops
from tests.support.native_levels import levels_with
from tests.support.needs import needs_native
from tests.support.op_cases.costs import nbytes

KERNELS = ("quantized", "dequantized")
pytestmark = needs_native
FORMATS = [WeightFormat("int8"), *(WeightFormat("int4", group) for group in (32, 64, 128))]
KEPT_ROWS = [WeightFormat("int8", 0, False), WeightFormat("int4", 64, False)]
SHAPES = [(1, 1), (3, 33), (31, 65), (64, 32), (127, 31), (255, 40), (257, 96), (600, 33)]
INT8_ROWS = RowRounding("int8")
TINY = 6e-8
"""The distance of the smallest numbers of fp16."""
ROWS = [0, 1, 2, 3, 5, 7, 8, 13, 33, 200, 250]


def name_of(value):
    if isinstance(value, WeightFormat):
        return f"{value.name}-{value.group}" + ("" if value.rounds_rows else "-weight-only")
    return str(value).removeprefix("torch.")


def has_own_code(isa, format):
    """Whether a level's products with a format are not those of the level before."""
    return isa in levels_with("quantized" if format.rounds_rows else "dequantized")


def draw(*shape, dtype=torch.float32, seed=0):
    """Rows of very different sizes, a row of zeros, one of almost nothing."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(*shape, generator=generator)
    if len(values) > 3:
        values[1] = 0
        values[2] *= 1e-4
        values[3] *= 9
    return values.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS + KEPT_ROWS, ids=name_of)
@pytest.mark.sharp(when=has_own_code)
def test_native_products_are_the_definition(isa, format, shape):
    width, out = shape
    for dtype in DTYPES:
        ops = cpu_ops(isa, dtype)
        weight, bias = draw(out, width, dtype=dtype), draw(out, dtype=dtype, seed=1)
        packed = ops.pack_linear(weight, bias, format)
        plain = quantize_weight(weight, bias, format)
        for rows in ROWS:
            x = draw(rows, width, dtype=dtype, seed=2)
            y, expected = ops.linear(x, packed), plain.multiply(x)
            # products with scales round differently, by units of fp32 and one of the dtype; where
            # the sums are not of integers, their order matters too
            largest = expected.float().abs().amax(1, keepdim=True)
            units = 2e-6 if format.rounds_rows else 2e-5
            limit = torch.finfo(dtype).eps * expected.float().abs() + units * largest + TINY
            assert ((y.float() - expected.float()).abs() <= limit).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS + KEPT_ROWS, ids=name_of)
@pytest.mark.sharp(when=has_own_code)
def test_a_row_has_the_same_bits_in_any_company(isa, format, shape):
    one, two = cpu_ops(isa, num_threads=1), cpu_ops(isa, num_threads=2)
    width, out = shape
    packed = one.pack_linear(draw(out, width), draw(out), format)
    x = draw(max(ROWS), width, seed=3)
    alone = torch.cat([one.linear(x[i : i + 1], packed) for i in range(len(x))])
    for rows in ROWS:
        assert torch.equal(one.linear(x[:rows], packed), alone[:rows])
        assert torch.equal(two.linear(x[len(x) - rows :], packed), alone[len(x) - rows :])


def test_int8_sums_are_the_same_integers_at_every_level(isa):
    # scales of 1: the sums themselves come out, and fp32 holds them
    ops = cpu_ops(isa)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-127, 128, (70, 516), generator=generator).float()
    x = torch.randint(-127, 128, (9, 516), generator=generator).float()
    weight[:, 0] = x[:, 0] = 127
    weight[0], x[0] = 127, -127  # where products of pairs do not fit into 16 bits
    y = ops.linear(x, ops.pack_linear(weight, None, WeightFormat("int8")))
    assert torch.equal(y.double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("shape", [(516, 70), (37, 5)], ids=str)
def test_stored_integers_may_be_the_lowest_of_a_byte(isa, shape):
    ops, (width, out) = cpu_ops(isa), shape
    generator = torch.Generator().manual_seed(6)
    weight = torch.randint(-128, 128, (out, width), generator=generator)
    x = torch.randint(-127, 128, (9, width), generator=generator).float()
    weight[:, 1::3] = -128
    weight[0], x[0] = -128, -127
    x[:, 0] = 127
    stored = CodedWeight(
        8, width, width, (weight + 128).to(torch.uint8), torch.ones(out, 1), rounding=INT8_ROWS
    )
    packed, expected = ops.pack_linear(stored, None), x.double() @ weight.double().T
    assert torch.equal(
        select(device="cpu", dtype=torch.float32, providers=["torch"])
        .linear(x, integer_linear(stored, None))
        .double(),
        expected,
    )
    for rows in (1, 2, 3, 9):
        assert torch.equal(ops.linear(x[:rows], packed).double(), expected[:rows])


def test_a_weight_of_sixteen_steps_is_exact_in_int4(isa):
    ops = cpu_ops(isa)
    generator = torch.Generator().manual_seed(6)
    weight = torch.randint(-8, 8, (40, 160), generator=generator).float()
    weight[:, ::32] = -8  # the largest of each group: the scale is 1
    x = torch.randint(-127, 128, (5, 160), generator=generator).float()
    x[:, 7] = 127
    for group in (32, 64, 128):
        packed = ops.pack_linear(weight, None, WeightFormat("int4", group))
        assert torch.equal(ops.linear(x, packed).double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("format", FORMATS + KEPT_ROWS, ids=name_of)
@pytest.mark.sharp(when=has_own_code)
def test_a_row_that_is_not_finite_stays_alone(isa, format):
    ops = cpu_ops(isa)
    packed = ops.pack_linear(draw(40, 70), None, format)
    x = draw(4, 70)
    before = ops.linear(x, packed)
    x[0, 69], x[3, 2] = float("nan"), float("inf")
    y = ops.linear(x, packed)
    assert not y[[0, 3]].isfinite().any()
    assert torch.equal(y[1:3], before[1:3])


def test_feed_forward_layers_logits_and_experts(isa):
    ops, plain = cpu_ops(isa), select(device="cpu", dtype=torch.float32, providers=["torch"])
    format = FORMATS[1]
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    # one choice for both: of equal logits, which a row has, each takes others
    chosen, weights = plain.route(draw(9, 4, seed=8), RouteArgs(2, "softmax", renorm=True))

    def results(o):
        up, down = draw(90, 48), o.pack_linear(draw(48, 45), None)
        gates, head = o.pack_linear(up, None, format, gated=True), o.pack_linear(up, None, format)
        experts = draw(4, 30, 48), draw(4, 48, 15)
        experts = o.pack_experts(*experts, stored_as=format, gated=True)
        return (
            o.linear(o.hidden(x, gates, "silu", True), down),
            o.logits(x, head, 0.5, 30.0),
            o.moe(x, chosen, weights, experts, MoeArgs()),
        )

    for native, expected in zip(results(ops), results(plain), strict=True):
        # an activation in the middle of two steps may go either way
        assert (native - expected).norm() < 2e-3 * expected.norm()


def test_memory_of_the_formats():
    ops = cpu_ops(None)
    weight = torch.zeros(1024, 512)
    sizes = [nbytes(ops.pack_linear(weight, None, format)) / weight.numel() for format in FORMATS]
    assert sizes == [1 + 4 / 512, 0.5 + 2 / 32, 0.5 + 2 / 64, 0.5 + 2 / 128]


def test_rounding_goes_to_the_nearest_and_uses_the_whole_range():
    x = torch.tensor([[127.0, -127, 63.5, 62.5, -0.4, 0]])
    q, scale = quantize_rows(x)
    assert q.tolist() == [[127, -127, 64, 62, 0, 0]] and scale.item() == 1
    weight = torch.linspace(-0.87, 1, 32)[None]
    packed = quantize_weight(weight, None, WeightFormat("int4", 32))
    assert packed.q.min() == -8 and packed.q.max() == 7
    back = packed.q[0, 0] * packed.scales[0, 0]
    assert (back - weight[0]).abs().max() <= packed.scales[0, 0].abs() * 0.51 + 1e-6
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(64, 512, generator=generator)
    for format, worst in zip(FORMATS, (0.01, 0.09, 0.1, 0.115), strict=True):
        w = quantize_weight(wide, None, format)
        back = (w.q * w.scales.unsqueeze(-1)).flatten(1)[:, :512]
        assert (back - wide).norm() < worst * wide.norm()


@pytest.mark.parametrize("field", ["scales", "q"])
def test_the_comparison_sees_a_wrong_weight(field):
    weight, format = draw(33, 70), FORMATS[1]
    plain = quantize_weight(weight, None, format)
    wrong = getattr(plain, field).clone()
    wrong[-1, -1] = 0
    wrong = dataclasses.replace(plain, **{field: wrong})
    x = draw(5, 70, seed=2)
    ops = cpu_ops(None)
    y = ops.linear(x, ops.pack_linear(weight, None, format))
    assert (y - plain.multiply(x)).abs().max() < 1e-5 * y.abs().max()
    assert (y - wrong.multiply(x)).abs().max() > 1e-4 * y.abs().max()
