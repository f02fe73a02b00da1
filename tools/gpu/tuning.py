"""What other tiles and other kernels would take, and where the host's time goes: for whoever tunes.

Compilation is most of the time that a sweep takes, so `warm` compiles a share of the variants in
each of several processes; Triton's cache on disk has them when `tiles` measures.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpu import engines
from gpu.ceilings import Ceilings
from gpu.clock import median_seconds
from gpu.kernels import attention_call
from gpu.told import Line
from quire.kernels.triton.attention import attend as kernels
from quire.ops import WeightFormat, select
from quire.ops.fp8 import FP8
from tests.support.op_cases import costs
from tests.support.op_cases.case import Draw


@dataclass(frozen=True)
class Work:
    """Attention of `rows` rows with `new` new tokens of `length`."""

    name: str
    rows: int
    new: int
    length: int
    stored: torch.dtype = torch.bfloat16
    is_fixed: bool = False


DECODE = Work("decode 64 x 4096", 64, 1, 4096)
FIXED = Work("fixed decode 64 x 4096", 64, 1, 4096, is_fixed=True)
FEW = Work("decode 8 x 4096", 8, 1, 4096)
ONE = Work("decode 1 x 32768", 1, 1, 32768)
IN_FP8 = Work("fp8 decode 64 x 4096", 64, 1, 4096, FP8)
IN_INT8 = Work("int8 decode 64 x 4096", 64, 1, 4096, torch.int8)
PREFILL = Work("prefill 8 x 2048", 8, 2048, 2048)
FIXED_PREFILL = Work("fixed prefill 8 x 2048", 8, 2048, 2048, is_fixed=True)

NARROW = ((64, 4, 3), (64, 4, 4), (64, 2, 3), (64, 2, 4), (32, 4, 5), (32, 2, 5), (128, 4, 2),
          (128, 4, 3), (128, 8, 3))  # fmt: skip
TALL = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2), (32, 4, 4))
WIDENED = ((32, 4, 4), (64, 4, 3), (64, 4, 4), (64, 2, 4), (128, 4, 3), (128, 8, 3), (64, 8, 3))
LONG = ((64, 8, 2), (64, 8, 3), (64, 8, 4), (128, 8, 2), (128, 8, 3), (64, 4, 2), (64, 4, 3),
        (128, 4, 2), (32, 8, 4))  # fmt: skip
SWEEP: tuple[tuple[Work, tuple[int, int], tuple[tuple[int, int, int], ...]], ...] = (
    (DECODE, (16, 128), NARROW),
    (DECODE, (64, 128), TALL),
    (FIXED, (16, 16), NARROW[:5]),
    (FEW, (16, 128), NARROW),
    (FEW, (64, 128), TALL[:4]),
    (ONE, (16, 128), NARROW[:5]),
    (IN_FP8, (16, 128), WIDENED),
    (IN_FP8, (64, 128), WIDENED[1:6]),
    (IN_INT8, (16, 128), WIDENED[:5]),
    (PREFILL, (16, 128), LONG),
    (PREFILL, (16, 64), LONG[4:8]),
    (PREFILL, (16, 256), ((64, 8, 2), (64, 8, 3), (32, 8, 3), (128, 8, 2))),
    (FIXED_PREFILL, (64, 64), ((64, 4, 3), (64, 4, 2), (64, 4, 4), (128, 4, 2))),
    (FIXED_PREFILL, (128, 128), ((64, 8, 3), (64, 8, 2), (128, 8, 2))),
)
"""Work, lines of a tile at least and at best, and (keys of a block, warps, stages) to try."""


def warm(share: int, step: int) -> Iterator[Line]:
    """Compile every `step`-th variant."""
    done = failed = 0
    for number, (work, shape, tiles) in enumerate(SWEEP):
        if number % step == share:
            call, _ = _call_of(replace(work, rows=1, length=min(work.length, 2048)), shape)
            for tile in tiles:
                with _tiling(*tile):
                    failed += not _runs(call)
                    done += 1
    yield Line(f"tiles compiled {share}", done, "", note=f"{failed} do not run")


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return False
    return True


def tiles(ceilings: Ceilings) -> Iterator[Line]:
    """What attention takes with each tile: a line for each kind of work."""
    for work, shape, variants in SWEEP:
        call, given = _call_of(work, shape)
        found: dict[str, float] = {}
        for tile in variants:
            with _tiling(*tile):
                if _runs(call):
                    found["{}k/{}w/{}s".format(*tile)] = median_seconds(call, 9)
        best = min(found, key=found.__getitem__)
        share = 100 * ceilings.share(*costs.attend(*given), found[best])
        note = ", ".join(f"{name} {1e6 * taken:.0f}" for name, taken in found.items())
        label = f"tiles {work.name}, lines {shape}: best {best}"
        yield Line(label, share, "%", note=f"us: {note}")
        del call, given
        torch.cuda.empty_cache()


def _call_of(work: Work, shape: tuple[int, int]) -> tuple[Callable[[], object], Any]:
    ops = select(device="cuda", dtype=torch.bfloat16, deterministic=work.is_fixed)
    q, kv, plan, args = attention_call(ops, work.rows, work.new, work.length, work.stored)
    plan = replace(plan, launches=tuple(replace(each, shape=shape) for each in plan.launches))
    given = (q, kv, plan, args)
    return lambda: ops.attend(*given), given


@contextmanager
def _tiling(keys: int, warps: int, stages: int) -> Iterator[None]:
    chosen = kernels.tiling
    kernels.tiling = lambda *_: {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
    try:
        yield
    finally:
        kernels.tiling = chosen


WEIGHTS = {
    "qkv": (4096, 6144), "out": (4096, 4096), "up": (4096, 28_672), "down": (14_336, 4096),
    "qkv 0.6B": (1024, 4096), "down 0.6B": (3072, 1024),
}  # fmt: skip
"""Inputs and outputs of products of an 8B and a 0.6B model."""


def gemv(ceilings: Ceilings) -> Iterator[Line]:
    """Products with few and more rows: cuBLAS's and torch's of 8-bit floats next to Triton's."""
    fast = select(device="cuda", dtype=torch.bfloat16)
    for name, (width, outputs) in WEIGHTS.items():
        draw = Draw(0, torch.bfloat16, "cuda")
        weight = torch.randn(outputs, width, dtype=torch.bfloat16, device="cuda") * width**-0.5
        for form in (None, WeightFormat("fp8")):
            w = fast.pack_linear(weight, None, form)
            theirs = w.multiply if form is None else w._scaled
            for rows in (1, 8, 16, 64, 256):
                x = draw.normal(rows, width)
                taken = median_seconds(lambda x=x, call=theirs: call(x))
                triton = median_seconds(lambda x=x, w=w: w.product(x))
                least = ceilings.least_seconds(*costs.linear(x, w))
                note = f"torch {taken * 1e6:.1f} us, Triton {triton * 1e6:.1f}"
                note += f", least {least * 1e6:.1f}"
                kind = "bf16" if form is None else form.name
                label = f"product {kind} {name}, {rows} rows: torch's of the limit"
                yield Line(label, 100 * least / taken, "%", note=note)


def launches() -> Iterator[Line]:
    """Host time of one call of each op of a layer, launches not waited for."""
    ops = select(device="cuda", dtype=torch.bfloat16)
    draw = Draw(0, torch.bfloat16, "cuda")
    given = attention_call(ops, 8, 1, 64)
    prompt = attention_call(ops, 1, 64, 64)
    x, y = draw.normal(8, 4096), draw.normal(8, 4096)
    up = ops.pack_linear(draw.normal(2 * 4096, 4096), None)
    w = ops.pack_linear(draw.normal(4096, 4096), None)
    calls: dict[str, Callable[[], object]] = {
        "attend, decodes": lambda: ops.attend(*given),
        "attend, a prompt": lambda: ops.attend(*prompt),
        "linear": lambda: ops.linear(x, w),
        "hidden": lambda: ops.hidden(x, up, "silu", True),
        "add": lambda: ops.add(x, y),
        "plan_attention": lambda: _plan(ops),
    }
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        taken = time.perf_counter() - start
        torch.cuda.synchronize()
        yield Line(f"host time of a call, {name}", taken / 200 * 1e6, "us")


def _plan(ops: Any) -> object:
    return ops.plan_attention(
        query_start=np.arange(9, dtype=np.int32),
        seq_lens=np.full(8, 64, dtype=np.int32),
        block_table=torch.zeros(8, 4, dtype=torch.int32, device="cuda"),
        block_size=32, window=None, kv_heads=8,
    )  # fmt: skip


def profile() -> Iterator[Line]:
    """Where the host's and the device's time of steps goes: short prompts, one and 256 streams."""
    with engines.engine("8b") as llm:
        engines.generate_seconds(llm, engines.prompts_of("8b", 256, 128), 8)  # warm
        for rows, length in ((1, 128), (1, 512), (4, 512)):
            prompts = engines.prompts_of("8b", rows, length)
            taken = [engines.generate_seconds(llm, prompts, 1) for _ in range(8)]
            yield Line(f"8B prompts {rows} x {length}", 1e3 * sorted(taken)[4], "ms")
        profiler = cProfile.Profile()
        prompts = engines.prompts_of("8b", 1, 512)
        profiler.enable()
        for _ in range(10):
            engines.generate_seconds(llm, prompts, 1)
        profiler.disable()
        yield Line(
            "8B prompts 1 x 512: host", 1e3 * _whole(profiler) / 10, "ms", note=_top(profiler)
        )
        for rows in (1, 256):
            yield from engines._idle(llm, "8b", rows)


def _whole(profiler: cProfile.Profile) -> float:
    return float(pstats.Stats(profiler).total_tt)  # type: ignore[attr-defined]


def _top(profiler: cProfile.Profile) -> str:
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:24]
    return "; ".join(
        f"{place[0].rsplit('/', 1)[-1]}:{place[1]} {place[2]} {calls}x {1e3 * own / 10:.2f} ms"
        for place, (_, calls, own, _, _) in rows
    )
