"""Weights that caches do not hold are read in another order, one stream for each thread: their
products have the bits of weights that stay in the caches.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import Ops, select
from tests.kernels.cpu.segment_worker import FORMATS, draw
from tests.support.needs import needs_native
from tests.support.op_cases import coded
from tests.support.op_cases.case import Draw

pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
KERNELS = ("linear", "quantized", "dequantized", "coded", "coded_digits")
HALF, WIDTH = 70, 1024
CODES = {
    "codes4": {"group": 128},
    "codes4 zeros": {"group": 32, "zeros": True},
    "codes4 small groups": {"group": 16},
    "codes8": {"bits": 8, "group": 64},
    "floats8": {"bits": 8, "group": 128, "floats": True},
    "table4": {"group": 64, "table": tuple(range(16))},
}


@cache
def ops_of(isa: str, is_streamed: bool) -> Ops:
    runtime = CpuRuntime(num_threads=2, isa=isa)
    runtime.context.streams_weights = is_streamed
    return select(device="cpu", dtype=torch.bfloat16, providers=["cpu"], runtime=runtime)


@pytest.mark.parametrize("name", [*FORMATS, *CODES])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_streamed_weights_give_the_same_bits(isa, gated, name):
    weight, stored_as = draw(2 * HALF, WIDTH, dtype=torch.bfloat16), FORMATS.get(name)
    if name in CODES:
        weight = coded.coded_weight(Draw(1, torch.float32), 2 * HALF, WIDTH, **CODES[name])
    bias = draw(2 * HALF, 1, dtype=torch.bfloat16, seed=4).flatten()
    found = []
    for ops in (ops_of(isa, False), ops_of(isa, True)):
        packed = ops.pack_linear(weight, bias, stored_as, 4, gated=gated)
        for rows in (1, 2, 7):
            x = draw(rows, WIDTH, dtype=torch.bfloat16, seed=2)
            found.append(ops.hidden(x, packed, "silu", gated) if gated else ops.linear(x, packed))
    assert all(map(torch.equal, found[:3], found[3:]))
