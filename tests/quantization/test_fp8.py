"""Weights in 8-bit floats: the nearest values of the type, and products close to exact ones."""

import numpy as np
import pytest
import torch

from quire.errors import NotBuiltYet
from quire.hardware.native import find_native
from quire.ops import WeightFormat, fp8, select
from quire.ops.fp8 import fp8_rows
from tests.support.op_cases.costs import nbytes

FP8 = WeightFormat("fp8")
PLAIN = select(device="cpu", dtype=torch.float32, providers=["torch"])


def numbers_of_the_type():
    """All finite values of e4m3: sign, four bits of exponent (bias 7), three of mantissa."""
    found = []
    for bits in range(127):  # 127 is NaN
        exponent, mantissa = bits >> 3, bits & 7
        value = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        found += [value, -value]
    return np.array(sorted(set(found)))


def test_rows_become_the_nearest_values():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 60)) * 2.0 ** rng.integers(-12, 3, (40, 60))
    numbers, scales = fp8_rows(torch.from_numpy(x).float())
    grid = numbers_of_the_type()
    assert grid.max() == 448.0
    exact = torch.from_numpy(x).float().double().numpy() / scales.double().numpy()
    nearest = np.abs(exact[..., None] - grid).min(-1)
    assert np.isin(numbers.double().numpy(), grid).all()
    assert np.allclose(np.abs(exact - numbers.double().numpy()), nearest, rtol=1e-4, atol=1e-6)
    assert (numbers.double().abs().amax(1) == 448.0).all()


def test_rows_of_zeros_and_poison():
    x = torch.tensor([[0.0, 0.0], [1e-38, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    numbers, scales = fp8_rows(x)
    assert scales[:2].flatten().tolist() == [0.0, 0.0]
    assert scales[2:].isnan().all()
    assert numbers.float().isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_products_are_close_to_exact_ones(rows):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(24, 64, generator=generator)
    bias = torch.randn(24, generator=generator)
    x = torch.randn(rows, 64, generator=generator)
    w = PLAIN.pack_linear(weight, bias, FP8)
    y = PLAIN.linear(x, w)
    exact = x.double() @ weight.double().T + bias
    assert y.shape == (rows, 24)
    assert y.dtype is torch.float32
    # 3 bits of mantissa: a relative error of at most 1/16 each, of random sign in a sum
    assert ((y - exact).abs() < 1.5).all()
    assert nbytes(w) == 24 * 64 + 4 * 24 + 4 * 24


def test_weights_are_rounded_alike_in_pieces(monkeypatch):
    weight = torch.randn(7, 12, generator=torch.Generator().manual_seed(5))
    numbers, scales = fp8_rows(weight)
    for piece in (1, 24, 30, 1 << 24):
        monkeypatch.setattr(fp8, "PIECE", piece)
        w = fp8.fp8_weight(weight, None)
        assert torch.equal(w.numbers.float(), numbers.float())
        assert torch.equal(w.scales, scales.squeeze(-1))
    assert fp8.fp8_weight(torch.ones(0, 4), None).numbers.shape == (0, 4)


def test_a_poisoned_row_poisons_its_own_result_alone():
    w = PLAIN.pack_linear(torch.ones(3, 16), None, FP8)
    x = torch.ones(2, 16)
    x[0, 3] = float("nan")
    y = PLAIN.linear(x, w)
    assert y[0].isnan().all()
    assert y[1].tolist() == pytest.approx([16.0] * 3)


@pytest.mark.skipif(find_native()[0] is None, reason=find_native()[1])
def test_the_native_provider_refuses_by_name():
    native = select(device="cpu", dtype=torch.float32)
    with pytest.raises(NotBuiltYet, match="quantization='fp8 on CPUs'.*Use int8"):
        native.pack_linear(torch.ones(4, 16), None, FP8)
    with pytest.raises(NotBuiltYet, match="kv_cache_dtype='fp8 on CPUs'.*Use int8"):
        native.allocate_kv(4, 16, 2, 8, torch.float8_e4m3fn)
