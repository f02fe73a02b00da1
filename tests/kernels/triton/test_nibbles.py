"""Weights of four bits: how they are packed, and the PTX that widens them: no interpreter runs it.

The PTX is read here instruction by instruction, as its manual (PTX ISA 8.5) defines them, on every
byte in every place of a register.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from quire.ops.quantized import WeightFormat, quantize_weight
from tests.support.needs import needs_triton

pytestmark = needs_triton

BYTES = np.stack([np.roll(np.arange(256, dtype=np.uint8), i * 37) for i in range(4)], 1)
WORDS = BYTES.view(np.uint32)[:, 0]
"""Registers in which every byte is in every place."""

SIGNED = torch.tensor([*range(8), *range(-8, 0)])
"""What four bits say in two's complement."""


@pytest.fixture(scope="module")
def nibbles():
    return pytest.importorskip("quire.kernels.triton.linear.nibbles")


class Registers:
    """A thread's 32-bit registers by name, for many threads at once."""

    def __init__(self, inputs):
        self.values = dict(inputs)

    def read(self, name):
        if name in self.values:
            return self.values[name]
        return np.uint32(int(name, 0))

    def run(self, text):
        for line in text.strip("{}\n").splitlines():
            name, *operands = re.split(r"[ ,;]+", line.strip().rstrip(";"))
            if name == ".reg":
                continue
            target, *sources = operands
            self.values[target] = getattr(self, name.replace(".", "_"))(*map(self.read, sources))
        return self.values

    def mov_b32(self, a):
        return a

    def shl_b32(self, a, by):
        return a << by

    def shr_u32(self, a, by):
        return a >> by

    def and_b32(self, a, b):
        return a & b

    def prmt_b32(self, a, b, selector):
        """Byte i of the result is the one of b:a that digit i of the selector names."""
        assert not selector & np.uint32(0x8888), "would repeat a sign"
        result = np.zeros_like(a)
        for i in range(4):
            source = int(selector) >> 4 * i & 7
            byte = (b if source >= 4 else a) >> np.uint32(source % 4 * 8) & np.uint32(255)
            result = result | byte << np.uint32(8 * i)
        return result

    def lop3_b32(self, a, b, c, table):
        """Bit by bit: the table's bit at a, b, c, read as a number of three bits."""
        result = np.zeros_like(a)
        for i in range(8):
            if int(table) >> i & 1:
                signs = [x if i >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
                result = result | signs[0] & signs[1] & signs[2]
        return result

    def fma_rn_bf16x2(self, a, b, c):
        return self._fma(torch.bfloat16, a, b, c)

    def fma_rn_f16x2(self, a, b, c):
        return self._fma(torch.float16, a, b, c)

    def _fma(self, dtype, *operands):
        a, b, c = (halves(x, dtype).double() for x in operands)
        exact = a * b + c
        rounded = exact.to(dtype)
        assert torch.equal(rounded.double(), exact), "widening rounds"
        return rounded.view(torch.int16).numpy().view(np.uint32)[..., 0]


def halves(word, dtype):
    """uint32 -> its low and its high 16 bits as floats [..., 2]."""
    numbers = np.ascontiguousarray(np.atleast_1d(word)[:, None]).view(np.int16)
    return torch.from_numpy(numbers.copy()).view(dtype)


def bytes_of(word):
    return torch.from_numpy(word[:, None].view(np.uint8).copy())


def test_ptx_for_whole_numbers_takes_each_half_times_sixteen(nibbles):
    found = Registers({"$2": WORDS}).run(nibbles.TO_WHOLE)
    stored = bytes_of(WORDS)
    for name, wanted in (("$0", SIGNED[stored.long() & 15]), ("$1", SIGNED[stored.long() >> 4])):
        assert torch.equal(bytes_of(found[name]).view(torch.int8).long(), 16 * wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ptx_for_floats_is_exact_and_keeps_the_order(nibbles, dtype):
    text = {torch.bfloat16: nibbles.TO_BFLOAT16, torch.float16: nibbles.TO_FLOAT16}[dtype]
    found = Registers({"$4": WORDS}).run(text)
    stored = bytes_of(WORDS).long()
    for names, wanted in ((("$0", "$1"), stored & 15), (("$2", "$3"), stored >> 4)):
        values = torch.cat([halves(found[name], dtype) for name in names], 1)
        assert torch.equal(values.double(), SIGNED[wanted].double())


@pytest.mark.parametrize("width", [64, 96, 70, 33, 1])
@pytest.mark.parametrize("rounds_rows", [True, False])
def test_packed_weights_are_the_ones_that_were_rounded(nibbles, width, rounds_rows):
    form = WeightFormat("int4", 32, rounds_rows=rounds_rows)
    draw = torch.Generator().manual_seed(width)
    flat = quantize_weight(torch.randn(5, width, generator=draw), None, form)
    stored, scales = nibbles.packed(flat)
    groups = -(-width // 32)
    assert stored.shape == (5, -(-groups // 2) * 32) and scales.shape == (-(-groups // 2), 5)
    two = scales[..., None].view(torch.bfloat16).float() * (16 if rounds_rows else 1)
    for group in range(groups):
        run = stored[:, group // 2 * 32 :][:, :32].long() >> 4 * (group % 2) & 15
        assert torch.equal(SIGNED[run], flat.q[:, group].long())
        assert torch.equal(two[group // 2, :, group % 2], flat.scales[:, group])
