"""NaN in tensors, wherever it is, also while they are packed; sums that tell tensors apart."""

import pytest
import torch

from quire.kernels.cpu.linear_ops import LinearOps
from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops.quantized import WeightFormat
from tests.support.needs import needs_native

pytestmark = needs_native
KERNELS = ("scan", "linear_pack", "quantized")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 127, 128, 4099, 2 * (256 << 10) + 77)
"""In bytes twice and four times as many: one piece, several, and with ends of each length."""


def scan(runtime, tensor, adds_up=False, copy=None):
    kind, to = runtime.types[tensor.dtype], 0 if copy is None else copy.data_ptr()
    return runtime.context.scan(kind, tensor.data_ptr(), tensor.nbytes, adds_up, to)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_found_wherever_it_is(isa, dtype):
    runtime = CpuRuntime(num_threads=2, isa=isa)
    for size in SIZES:
        tensor = torch.full((size,), float("-inf"), dtype=dtype)
        assert scan(runtime, tensor) == (False, [])
        for place in {0, size // 2, size - 1}:
            for bits in (float("nan"), -float("nan")):
                tensor[place] = bits
                assert scan(runtime, tensor)[0]
            tensor[place] = float("inf")


@pytest.mark.parametrize("start", [0, 64, 77])
def test_bytes_are_copied_as_they_are(isa, start):
    runtime = CpuRuntime(num_threads=2, isa=isa)
    for size in SIZES:
        tensor = torch.randint(-32768, 32768, (size,), dtype=torch.int16).view(torch.bfloat16)
        room = torch.full((2 * size + 256,), 7, dtype=torch.uint8)
        at = -room.data_ptr() % 64 + start
        scan(runtime, tensor, copy=room[at:])
        assert torch.equal(room[at : at + 2 * size], tensor.view(torch.uint8))
        assert room[:at].eq(7).all() and room[at + 2 * size :].eq(7).all()


def test_sums_tell_tensors_apart(isa):
    runtime = CpuRuntime(num_threads=2, isa=isa)
    rows = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    swapped, other = rows.clone(), rows.clone()
    swapped[[0, 299]] = swapped[[299, 0]]
    other[299, 999] += 1
    sums = [scan(runtime, each, True)[1] for each in (rows, rows.clone(), swapped, other)]
    assert sums[0] == sums[1] and len({tuple(each) for each in sums}) == 3
    portable = CpuRuntime(isa="portable")
    assert scan(portable, rows, True)[1] == sums[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored_as", [None, WeightFormat("int8"), WeightFormat("int4", 32)])
def test_nan_is_found_while_weights_are_packed(isa, dtype, stored_as):
    runtime = CpuRuntime(num_threads=2, isa=isa)
    ops = LinearOps(runtime, dtype)
    for shape in ((70, 37), (64, 130)):
        weight = torch.ones(shape, dtype=dtype)
        for place in (None, (0, 0), (shape[0] - 1, shape[1] - 1), (33, 36)):
            given = weight.clone()
            if place is not None:
                given[place] = float("nan")
            old = ops.pack_linear(weight, None, stored_as)
            with runtime.weights_replace([old.panels]) as is_clean:
                assert not is_clean()
                new = ops.pack_linear(given, None, stored_as)
                assert is_clean() == (place is None)
            assert new.panels.data_ptr() == old.panels.data_ptr()
