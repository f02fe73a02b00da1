"""Weights of four bits, two in a byte, and how a program widens them.

Inputs come in pairs of groups: byte j of a pair holds input j of the first group in its low half
and input j of the second in its high half, as two's complement. So a program reads whole runs of
bytes, each byte once, and gets two operands whose inputs are neighbours in x as well.

Decoding reads 40 such weights a clock and SM at Hopper's bandwidth, where the SM issues 128
operations. What the compiler makes of a conversion takes two to three operations a weight; the PTX
here takes one and a half (16-bit floats) or a half (whole numbers), since it widens in 32-bit
registers as they are loaded.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import is_interpreted, kernel
from quire.ops.quantized import QuantizedLinear

WHOLE_SCALE = 16.0
"""Factor that `widened` gives whole numbers: their four bits stay the upper ones of a byte."""

TO_WHOLE = """{
.reg .b32 up;
shl.b32 up, $2, 4;
and.b32 $0, up, 0xF0F0F0F0;
and.b32 $1, $2, 0xF0F0F0F0;
}"""
"""Four bytes -> the low halves and the high halves, each times 16, as four int8."""


def _to_floats(base: int, one: int, minus_base: int, type: str) -> str:
    """PTX: four bytes $4 -> the low halves $0 $1 and the high halves $2 $3 as four 16-bit floats.

    A number n of -8..7 becomes the lowest bits of a float as n + 8, which is that float plus n + 8
    where a step is 1; then that float and 8 are subtracted, both exactly. `base` are the bits of
    the float plus 8, twice, so that one operation takes the four bits and flips the sign's.
    """
    high, moved, flipped, floats = ".reg .b32 high;", [], [], []
    for i in range(4):
        source, selected = ("$4", "high")[i // 2], ("0x4140", "0x4342")[i % 2]
        moved.append(f"prmt.b32 n{i}, {source}, 0, {selected};")
        flipped.append(f"lop3.b32 n{i}, n{i}, 0x000F000F, 0x{base:08X}, 0x6A;")
        floats.append(f"fma.rn.{type}x2 ${i}, n{i}, one, offset;")
    constants = [f"mov.b32 one, 0x{one:08X};", f"mov.b32 offset, 0x{minus_base:08X};"]
    registers = [high, ".reg .b32 one, offset, n<4>;"]
    lines = [*registers, *constants, "shr.u32 high, $4, 4;", *moved, *flipped, *floats]
    return "\n".join(["{", *lines, "}"])


TO_BFLOAT16 = _to_floats(0x43084308, 0x3F803F80, 0xC308C308, "bf16")
TO_FLOAT16 = _to_floats(0x64086408, 0x3C003C00, 0xE408E408, "f16")


def ptx_for(dot: Any) -> str | None:
    """PTX that widens to operands of this type; None where there is none: float32, and in Triton's
    interpreter.
    """
    known = {tl.int8: TO_WHOLE, tl.bfloat16: TO_BFLOAT16, tl.float16: TO_FLOAT16}
    return None if is_interpreted() else known.get(dot)


@kernel
def widened(b: tl.tensor, DOT: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr) -> Any:
    """uint8 b -> the numbers in its low and in its high halves as DOT, which is int8 if WHOLE: then
    they are times 16. PTX: what `ptx_for` says.
    """
    if PTX is not None and WHOLE:
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [b], (tl.int8, tl.int8), True, 4)
    elif PTX is not None:
        low, high = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r", [b], (tl.int16, tl.int16), True, 4
        )
        return low.to(DOT, bitcast=True), high.to(DOT, bitcast=True)
    elif WHOLE:
        return (b << 4).to(DOT, bitcast=True), (b & 0xF0).to(DOT, bitcast=True)
    else:
        return ((b & 15) ^ 8).to(DOT) - 8.0, ((b >> 4) ^ 8).to(DOT) - 8.0


@kernel
def two_scales(both: tl.tensor) -> Any:
    """int32 with a bf16 in each half -> the low ones and the high ones in fp32, whose upper half a
    bf16 is.
    """
    low, high = both << 16, both & -65536
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


def packed(flat: QuantizedLinear) -> tuple[Tensor, Tensor]:
    """q [out, G, group] of -8..7 -> uint8 [out, P * group], and scales [P, out] int32 of two bf16,
    the first group's in the low half; bf16 is what they were rounded to. P pairs of groups, the
    last filled up with zeros. A pair's scales are in one number so that a program can copy them
    ahead as it does weights: the least that such a copy moves is four bytes.
    """
    is_odd = flat.q.shape[1] % 2
    low, high = F.pad(flat.q, (0, 0, 0, is_odd)).unflatten(1, (-1, 2)).unbind(2)
    scales = F.pad(flat.scales / (WHOLE_SCALE if flat.rounds_rows else 1.0), (0, is_odd))
    two = scales.bfloat16().unflatten(1, (-1, 2)).transpose(0, 1).contiguous()
    return ((low & 15) | (high << 4)).view(torch.uint8).flatten(1), two.view(torch.int32).squeeze(2)
