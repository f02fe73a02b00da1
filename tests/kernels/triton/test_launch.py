"""Launches after the first of a variant: what the compiled kernel gets, and what a variant is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from quire.kernels.triton import launch  # noqa: E402


def scale(x, n: int, factor: float, BLOCK: tl.constexpr, OUT: tl.constexpr = 7):  # noqa: F821, N803
    """Never run: what is compiled is a double."""


@pytest.fixture
def device(monkeypatch):
    """Triton's own launches, and those of the compiled doubles that it made."""
    noted = SimpleNamespace(own=[], quick=[])

    def run(self, *args, grid, warmup, **kwargs):
        noted.own.append(kwargs)
        name = len(noted.own)
        return SimpleNamespace(
            function=f"function {name}", packed_metadata="metadata",
            run=lambda *given: noted.quick.append(given),
        )  # fmt: skip

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 77)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return noted


def test_the_second_launch_of_a_variant_goes_straight_to_its_function(device):
    kernel, x = launch.Kernel(scale, ["n", "factor"]), torch.zeros(32)
    kernel[(3, 2)](x, 5, 0.5, BLOCK=16, num_warps=2)
    assert len(device.own) == 1 and device.quick == []
    y = torch.ones(32)
    kernel[(4,)](y, 6, 1.5, BLOCK=16, num_warps=2)
    assert len(device.own) == 1
    [given] = device.quick
    assert given[:9] == (4, 1, 1, 77, "function 1", "metadata", None, None, None)
    assert given[9] is y and given[10:] == (6, 1.5, 16, 7)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x[1:17], 5, 0.5, {}),
        lambda x: (x.half(), 5, 0.5, {}),
        lambda x: (x, 1 << 40, 0.5, {}),
        lambda x: (x, 5, 0.5, {"BLOCK": 32}),
        lambda x: (x, 5, 0.5, {"num_warps": 4}),
    ],
    ids=["alignment", "dtype", "long", "constant", "option"],
)
def test_what_triton_compiles_anew_is_a_variant_of_its_own(device, other):
    kernel, x = launch.Kernel(scale, ["n", "factor"]), torch.zeros(32)
    kernel[(1,)](x, 5, 0.5, BLOCK=16, num_warps=2)
    *args, changed = other(x)
    kernel[(1,)](*args, **{"BLOCK": 16, "num_warps": 2} | changed)
    assert len(device.own) == 2 and device.quick == []
    kernel[(1,)](x, 9, 2.5, BLOCK=16, num_warps=2)
    assert [given[4] for given in device.quick] == ["function 1"]


def test_another_device_has_functions_of_its_own(device, monkeypatch):
    kernel, x = launch.Kernel(scale, ["n", "factor"]), torch.zeros(32)
    kernel[(1,)](x, 5, 0.5, BLOCK=16)
    monkeypatch.setattr(launch.driver.active, "get_current_device", lambda: 1)
    kernel[(1,)](x, 5, 0.5, BLOCK=16)
    assert len(device.own) == 2 and device.quick == []
