"""Every operation on real shapes, each beside the larger of its two limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpu.ceilings import Ceilings
from gpu.clock import median_seconds
from gpu.told import Line
from quire.errors import InvalidParameter
from quire.ops import AttentionArgs, Ops, WeightFormat, select
from quire.ops.fp8 import FP8
from tests.support.op_cases import CASES, costs
from tests.support.op_cases.case import Draw

_BLOCK_SIZE = 32
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_WIDTH, _FFN = 4096, 14_336
FORMATS = (
    None,
    WeightFormat("fp8"),
    WeightFormat("int8"),
    WeightFormat("int4", 64, rounds_rows=False),
)


@dataclass(frozen=True)
class Measured:
    """One call: what it took, the least that it moves and computes."""

    name: str
    seconds: float
    num_bytes: int
    flops: int

    def line(self, ceilings: Ceilings, target: float | None) -> Line:
        """The share of the limit, and the rates as a note."""
        rates = (self.num_bytes / self.seconds / 1e9, self.flops / self.seconds / 1e12)
        note = f"{self.seconds * 1e6:.1f} us, {rates[0]:.0f} GB/s, {rates[1]:.1f} TFLOP/s"
        share = ceilings.share(self.num_bytes, self.flops, self.seconds)
        return Line(f"kernel {self.name}", 100 * share, "%", target, note=note)


def attentions(ceilings: Ceilings) -> Iterator[Line]:
    """The attentions of an 8B model, those with a target first; providers next to each other."""
    ops = select(device="cuda", dtype=torch.bfloat16)
    yield attention(ops, "decode 64 x 4096", 64, 1, 4096).line(ceilings, 85)
    yield attention(ops, "prefill 8 x 2048", 8, 2048, 2048).line(ceilings, 60)
    yield attention(ops, "prefill 2 x 8192", 2, 8192, 8192).line(ceilings, 60)
    for rows, length in ((1, 4096), (1, 32_768), (8, 4096), (256, 1024)):
        yield attention(ops, f"decode {rows} x {length}", rows, 1, length).line(ceilings, None)
    for stored, name in ((FP8, "fp8"), (torch.int8, "int8")):
        yield attention(ops, f"decode 64 x 4096, {name} K/V", 64, 1, 4096, stored).line(
            ceilings, None
        )
    fixed = select(device="cuda", dtype=torch.bfloat16, deterministic=True)
    yield attention(fixed, "decode 64 x 4096, fixed", 64, 1, 4096).line(ceilings, None)
    yield attention(fixed, "prefill 8 x 2048, fixed", 8, 2048, 2048).line(ceilings, None)
    yield from side_by_side(ceilings)


def table(ceilings: Ceilings, until: float) -> Iterator[Line]:
    """Products of an 8B model, then the ops' own cases, until `until` (time.monotonic)."""
    ops = select(device="cuda", dtype=torch.bfloat16)
    for stored_as in FORMATS:
        for rows in (1, 16, 64, 256, 2048):
            yield product(ops, rows, stored_as).line(ceilings, None)
    for case in CASES:
        if case.is_bench and case.op != "attend" and time.monotonic() < until:
            draw = case.draw(torch.bfloat16, "cuda")
            arguments = case.prepare(ops, draw).arguments
            seconds = median_seconds(lambda case=case, given=arguments: case.run(ops, given))
            cost = case.num_bytes(arguments), case.flops(arguments)
            yield Measured(f"{case.op} {case.name}", seconds, *cost).line(ceilings, None)


def side_by_side(ceilings: Ceilings, device: str = "cuda") -> Iterator[Line]:
    """Prompts through each provider of attention that serves here; why one does not is a note."""
    missing, providers = [], {}
    for name in ("fa3", "triton"):
        try:
            providers[name] = select(
                device=device, dtype=torch.bfloat16, providers=[f"attend={name}"]
            )
        except InvalidParameter as error:
            missing.append(str(error))
    for rows, new, length in ((8, 2048, 2048), (8, 512, 8192)):
        for name, ops in providers.items():
            label = f"prefill {rows} x {new} of {length}, {name}"
            line = attention(ops, label, rows, new, length, device=device).line(ceilings, None)
            yield replace(line, note="; ".join([line.note, *missing]))


def attention_call(
    ops: Ops,
    rows: int,
    new: int,
    length: int,
    stored: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> tuple[Any, ...]:
    """The arguments of `attend` for rows of `length` tokens, `new` of them new, in KV memory of
    type `stored`; heads of an 8B model, blocks shuffled.
    """
    per_row = -(-length // _BLOCK_SIZE)
    num_blocks = rows * per_row
    kv = ops.allocate_kv(num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, stored)
    for ids in torch.arange(num_blocks).split(4096):
        shape = (len(ids), 2, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM)
        ops.import_kv(kv, ids, torch.randn(shape, dtype=torch.bfloat16, device=device))
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    plan = ops.plan_attention(
        query_start=np.arange(rows + 1, dtype=np.int32) * new,
        seq_lens=np.full(rows, length, dtype=np.int32),
        block_table=torch.from_numpy(order.reshape(rows, per_row)).to(device),
        block_size=_BLOCK_SIZE,
        window=None,
        kv_heads=_KV_HEADS,
    )
    q = torch.randn(rows * new, _HEADS, _HEAD_DIM, dtype=torch.bfloat16, device=device)
    return q, kv, plan, AttentionArgs(scale=_HEAD_DIM**-0.5)


def attention(
    ops: Ops,
    name: str,
    rows: int,
    new: int,
    length: int,
    stored: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> Measured:
    """The time of `attention_call`."""
    given = attention_call(ops, rows, new, length, stored, device)
    seconds = median_seconds(lambda: ops.attend(*given))
    return Measured(f"attend {name}", seconds, *costs.attend(*given))


def product(
    ops: Ops,
    rows: int,
    stored_as: WeightFormat | None,
    device: str = "cuda",
    width: int | None = None,
    outputs: int = _WIDTH,
) -> Measured:
    """One weight; that of the down projection of an 8B model if no width is given."""
    width = _FFN if width is None else width
    draw = Draw(0, torch.bfloat16, device)
    weight = torch.randn(outputs, width, dtype=torch.bfloat16, device=device) * width**-0.5
    w = ops.pack_linear(weight, None, stored_as)
    x = draw.normal(rows, width)
    seconds = median_seconds(lambda: ops.linear(x, w))
    form = "bf16" if stored_as is None else f"{stored_as.name}{stored_as.group or ''}"
    name = f"linear {form} {rows} x {width} x {outputs}"
    return Measured(name, seconds, *costs.linear(x, w))
