"""Attention over latents at the shapes of published models, and what other tiles would take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch

from gpu.ceilings import Ceilings
from gpu.clock import median_seconds
from gpu.kernels import Measured
from gpu.told import Line
from quire.kernels.triton.attention import latent_attend as kernels
from quire.ops import Ops, select
from quire.ops.kv import LatentShape, LayerLatents
from quire.ops.mixers.latent import latent_attend, plan_latent
from tests.support.op_cases import costs

_BLOCK_SIZE = 32
_SCALE = 192**-0.5
LITE, V3, MINICPM3 = (16, 512, 64), (128, 512, 64), (40, 256, 32)
"""Heads, numbers of a latent and of a rotated key: DeepSeek-V2-Lite, V3, MiniCPM3."""

WORK = {
    "Lite decode 1 x 4096": (LITE, 1, 1, 4096),
    "Lite decode 64 x 4096": (LITE, 64, 1, 4096),
    "Lite prefill 4 x 2048": (LITE, 4, 2048, 2048),
    "V3 decode 1 x 4096": (V3, 1, 1, 4096),
    "V3 decode 64 x 4096": (V3, 64, 1, 4096),
    "V3 prefill 1 x 2048": (V3, 1, 2048, 2048),
    "MiniCPM3 decode 64 x 4096": (MINICPM3, 64, 1, 4096),
}
"""Name -> shape, rows, new tokens, tokens."""

TILES = ((32, 4, 2), (32, 4, 3), (32, 8, 2), (32, 8, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3),
         (16, 4, 4), (16, 8, 4))  # fmt: skip
"""Keys of a block, warps, stages."""


HEADS = tuple((heads, *widths) for heads in (LITE[0], V3[0]) for widths in ((128, 512), (512, 128)))
"""Heads, inputs and outputs of the products around attention."""


def table(ceilings: Ceilings, device: str = "cuda") -> Iterator[Line]:
    """Every work as it is served, with bits that may vary and with bits that may not."""
    for is_fixed in (False, True):
        ops = select(device=device, dtype=torch.bfloat16, deterministic=is_fixed)
        for name, work in WORK.items():
            given = call(ops, *work, device=device)
            error = error_of(ops, given, work)
            seconds = median_seconds(lambda ops=ops, given=given: ops.latent_attend(*given))
            label = f"latent_attend {name}{', fixed' * is_fixed}"
            line = Measured(label, seconds, *costs.latent_attend(*given)).line(ceilings, None)
            yield replace(line, note=f"{line.note}, error {error:.1e}")
    ops = select(device=device, dtype=torch.bfloat16)
    for rows, (heads, width, out) in product((1, 64, 2048), HEADS):
        w = ops.pack_heads(torch.randn(heads, out, width, device=device).bfloat16())
        x = torch.randn(rows, heads, width, device=device).bfloat16()
        seconds = median_seconds(lambda ops=ops, x=x, w=w: ops.heads_linear(x, w))
        name = f"heads_linear {rows} x {heads} x {width} x {out}"
        yield Measured(name, seconds, *costs.heads_linear(x, w)).line(ceilings, None)


def tiles(ceilings: Ceilings, until: float) -> Iterator[Line]:
    """Each work with other tiles, until `until` (time.monotonic)."""
    for is_fixed in (False, True):
        ops = select(device="cuda", dtype=torch.bfloat16, deterministic=is_fixed)
        for name, work in WORK.items():
            given = call(ops, *work)
            for tile in TILES:
                if time.monotonic() > until:
                    return
                yield _with_tile(ceilings, f"{name}{', fixed' * is_fixed}", ops, given, tile)


def _with_tile(
    ceilings: Ceilings, name: str, ops: Ops, given: tuple[Any, ...], tile: tuple[int, int, int]
) -> Line:
    facts = dict(zip(("BLOCK_N", "num_warps", "num_stages"), tile, strict=True))
    label = f"latent_attend {name}, tile {' '.join(map(str, tile))}"
    try:
        with mock.patch.object(kernels, "latent_tiling", lambda *_: facts):
            seconds = median_seconds(lambda: ops.latent_attend(*given))
    except Exception as error:  # a tile that does not fit
        return Line(label, None, note=f"{type(error).__name__}: {error}"[:100])
    return Measured(label, seconds, *costs.latent_attend(*given)).line(ceilings, None)


def call(
    ops: Ops, shape: tuple[int, int, int], rows: int, new: int, length: int, device: str = "cuda"
) -> tuple[Any, ...]:
    """The arguments of `latent_attend` for rows of `length` tokens, `new` of them new; blocks are
    shuffled.
    """
    heads, rank, rotated = shape
    blocks = rows * (length // _BLOCK_SIZE)
    [latents] = ops.allocate_shared_kv(
        blocks, [LatentShape(_BLOCK_SIZE, rank, rotated)], torch.bfloat16
    )
    assert isinstance(latents, LayerLatents)
    latents.data.normal_()
    plan = ops.plan_latent(**_step(rows, new, length, device))
    q = torch.randn(rows * new, heads, rank, device=device).bfloat16()
    turned = torch.randn(rows * new, heads, rotated, device=device).bfloat16()
    return q, turned, latents, plan, _SCALE


def _step(rows: int, new: int, length: int, device: str) -> dict[str, Any]:
    order = np.random.default_rng(0).permutation(rows * (length // _BLOCK_SIZE)).astype(np.int32)
    return {
        "query_start": np.arange(rows + 1, dtype=np.int32) * new,
        "seq_lens": np.full(rows, length, dtype=np.int32),
        "block_table": torch.from_numpy(order.reshape(rows, -1)).to(device),
        "block_size": _BLOCK_SIZE,
    }


def error_of(ops: Ops, given: tuple[Any, ...], work: tuple[Any, ...]) -> float:
    """The largest error of the first row's result, of the largest number, beside plain torch in
    float32.
    """
    q, turned, latents, _, scale = given
    _, rows, new, length = work
    found = ops.latent_attend(*given)[:new].float()
    step = _step(rows, new, length, str(q.device))
    step |= {"query_start": step["query_start"][:2], "seq_lens": step["seq_lens"][:1]}
    plan = plan_latent(**step | {"block_table": step["block_table"][:1]})
    wide = LayerLatents(latents.data.float(), latents.rank)
    right = latent_attend(q[:new].float(), turned[:new].float(), wide, plan, scale)
    return float((found - right).abs().max() / right.abs().max())
