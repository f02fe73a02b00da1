"""The native matrix products: hostile shapes, equal bits in any company, bugs that must show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.linear_ops import LinearOps
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import select
from quire.ops.activation import ACTIVATIONS
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id, has_own_code, is_sharp
from tests.support.needs import needs_native
from tests.support.op_cases import CASES
from tests.support.op_cases.costs import nbytes
from tests.support.op_conformance import check, relative_error

KERNELS = ("linear", "linear_pack", "finish")
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
HOSTILE = [case for case in CASES if case.op in ops_of(LinearOps) and not case.is_bench]
ROWS = [0, 1, 2, 3, 5, 7, 8, 13, 33, 200, 250]
SHAPES = [(1, 1), (2, 33), (3, 31), (31, 65), (127, 32), (128, 64), (129, 1), (257, 96), (640, 70)]


def draw(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def error_limit(x, weight, bias, truth):
    """The rounding to the dtype, and 4 units in fp32 of the sum of the products' magnitudes: the
    worst case is one per input, which an unlucky order comes near.
    """
    magnitudes = F.linear(x.abs().double(), weight.abs().double(), bias.abs().double())
    rounding = torch.finfo(x.dtype).eps / 2 * truth.abs()
    return rounding + 4 * torch.finfo(torch.float32).eps / 2 * magnitudes


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    ops = cpu_ops(isa, dtype).replace(batch_invariant=True)
    check(case, dtype, ops)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=has_own_code)
def test_products_of_any_shape_are_right(isa, dtype, shape):
    ops = cpu_ops(isa, dtype)
    width, out = shape
    weight, bias = draw(out, width, dtype=dtype, scale=width**-0.5), draw(out, dtype=dtype)
    packed = ops.pack_linear(weight, bias)
    for rows in ROWS:
        x = draw(rows, width, dtype=dtype, seed=1)
        y = ops.linear(x, packed)
        truth = F.linear(x.double(), weight.double(), bias.double())
        assert y.shape == truth.shape and y.dtype is dtype
        assert ((y - truth).abs() <= error_limit(x, weight, bias, truth)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=has_own_code)
def test_a_row_has_the_same_bits_in_any_company(isa, dtype, shape):
    one, two = cpu_ops(isa, dtype, num_threads=1), cpu_ops(isa, dtype, num_threads=2)
    width, out = shape
    weight, bias = draw(out, width, dtype=dtype), draw(out, dtype=dtype)
    packed = one.pack_linear(weight, bias)
    x = draw(max(ROWS), width, dtype=dtype, seed=2)
    alone = torch.cat([one.linear(x[i : i + 1], packed) for i in range(len(x))])
    for rows in ROWS:
        for start in (0, len(x) - rows):
            part = slice(start, start + rows)
            assert torch.equal(one.linear(x[part], packed), alone[part])
            assert torch.equal(two.linear(x[part], packed), alone[part])


def feed_forward(ops, x, up, down, act, gated):
    return ops.linear(ops.hidden(x, up, act, gated), down)


@pytest.mark.parametrize("ffn", [1, 31, 32, 45, 64, 100])
@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
def test_feed_forward_layers(isa, act, ffn):
    ops, dtype = cpu_ops(isa, torch.float32), torch.float32
    for gated in (True, False):
        up, bias = draw(ffn * (1 + gated), 40, dtype=dtype), draw(ffn * (1 + gated), dtype=dtype)
        down = draw(24, ffn, dtype=dtype)
        packed = ops.pack_linear(up, bias, gated=gated), ops.pack_linear(down, None)
        x = draw(260, 40, dtype=dtype)
        y = feed_forward(ops, x, *packed, act, gated)
        h = F.linear(x.double(), up.double(), bias.double())
        gate = ACTIVATIONS[act](h[:, :ffn])
        truth = F.linear(gate * h[:, ffn:] if gated else gate, down.double())
        assert relative_error(y, truth) < 2e-6
        assert torch.equal(y[3:4], feed_forward(ops, x[3:4], *packed, act, gated))


@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
def test_activations_are_exact_over_their_range(isa, act):
    ops = cpu_ops(isa, torch.float32)
    one = ops.pack_linear(torch.ones(1, 1), None)
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])
    x = torch.cat([torch.linspace(-12, 12, 20_001), edges]).unsqueeze(1)
    y = feed_forward(ops, x, one, one, act, False)
    truth = ACTIVATIONS[act](x.double())
    assert ((y - truth).abs() <= 4e-7 * x.abs().clamp(max=12) + 1e-6 * truth.abs()).all()


def test_not_a_number_and_infinity_come_through(isa):
    ops = cpu_ops(isa, torch.float32)
    one = ops.pack_linear(torch.ones(1, 1), None)
    x = torch.tensor([[float("nan")], [float("inf")], [1.0]])
    for act in ACTIVATIONS:
        y = feed_forward(ops, x, one, one, act, False)
        assert y[0].isnan() and y[1] == float("inf") and y[2].isfinite()
    capped = ops.logits(x, one, 1.0, 30.0)
    assert capped[0].isnan() and capped[1] == 30.0


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=has_own_code)
def test_capped_logits(isa, dtype):
    ops = cpu_ops(isa, dtype)
    head = ops.pack_linear(draw(70, 48, dtype=dtype), None)
    x = draw(5, 48, dtype=dtype)
    scores = ops.linear(x, head).float()
    assert torch.equal(ops.logits(x, head), scores)
    assert torch.equal(ops.logits(x, head, 0.37), scores * 0.37)
    truth = 15 * torch.tanh(scores.double() * 0.37 / 15)
    assert relative_error(ops.logits(x, head, 0.37, 15.0), truth) < 1e-6


def test_a_strided_weight_is_packed_as_it_is():
    ops = cpu_ops(None, torch.bfloat16)
    whole = draw(50, 90, dtype=torch.bfloat16)
    x = draw(3, 45, dtype=torch.bfloat16)
    for view in (whole[:40, :45], whole[:, ::2], whole[5:45, 45:]):
        w = ops.pack_linear(view, None)
        assert torch.equal(ops.linear(x, w), ops.linear(x, ops.pack_linear(view.clone(), None)))


def test_bf16_weights_stay_two_bytes():
    w = cpu_ops(None, torch.bfloat16).pack_linear(torch.zeros(4096, 1024).bfloat16(), None)
    assert nbytes(w) == 4096 * 1024 * 2


@pytest.mark.parametrize("is_streamed", [False, True], ids=["of caches", "of memory"])
def test_recorded_products_serve_any_number_of_rows(is_streamed):
    runtime = CpuRuntime(num_threads=2)
    runtime.context.streams_weights = is_streamed
    ops = select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime)
    weights = draw(90, 33, dtype=torch.float32), draw(90, dtype=torch.float32)
    up, head = ops.pack_linear(*weights, gated=True), ops.pack_linear(*weights)
    down = ops.pack_linear(draw(33, 45, dtype=torch.float32), None)
    inputs = draw(300, 33, dtype=torch.float32)
    program = Program(runtime, capacity=300)
    with program.recording():
        recorded = ops.logits(feed_forward(ops, inputs, up, down, "silu", True), head, 2.0)
    for rows in (1, 7, 300, 2, 0):
        program.replay(rows)
        x = inputs[:rows]
        expected = ops.logits(feed_forward(ops, x, up, down, "silu", True), head, 2.0)
        assert torch.equal(recorded[:rows], expected)


@pytest.mark.parametrize(
    ("cache_bytes", "num_bytes", "expected"),
    [(1 << 20, 1 << 20, False), (1 << 20, 5 << 20, True), (0, 1 << 40, False)],
)
def test_weights_that_caches_do_not_hold_are_streamed(
    monkeypatch, cache_bytes, num_bytes, expected
):
    monkeypatch.setattr("quire.kernels.cpu.runtime.victim_cache_bytes", lambda: cache_bytes)
    runtime = CpuRuntime()
    runtime.expect_weights(num_bytes)
    assert runtime.context.streams_weights is expected


def swapped_gate(ops):
    def hidden(x, up, act, gated, addend=None):
        if not gated:
            return ops.hidden(x, up, act, gated, addend)
        a, b = ops.linear(x, up).chunk(2, -1)
        return a * F.silu(b)

    return hidden


def blind_to_the_last_input(ops):
    def linear(x, w, addend=None):
        x = x.clone()
        x[:, -1] = 0
        return ops.linear(x, w, addend)

    return linear


def summed_in_another_order(ops):
    def linear(x, w, addend=None):
        if len(x) == 1 or addend is not None:
            return ops.linear(x, w, addend)
        return F.linear(x, unpacked(ops, w))

    return linear


def unpacked(ops, w):
    return ops.linear(torch.eye(w.in_features), w).T.contiguous()


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("hidden", swapped_gate),
        ("linear", blind_to_the_last_input),
        ("linear", summed_in_another_order),
    ],
)
def test_the_rules_see_a_bug(op, make):
    dtype = torch.float32
    ops = cpu_ops(None, dtype).replace(batch_invariant=True)
    wrong = ops.replace(**{op: make(ops)})
    failures = 0
    for case in HOSTILE:
        if case.op == op:
            try:
                check(case, dtype, wrong)
            except AssertionError:
                failures += 1
    assert failures
