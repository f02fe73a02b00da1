"""The chosen experts: two products of pairs grouped by expert, and a sum in the order of choice."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.gates import activate
from quire.kernels.triton.launch import dense, kernel
from quire.kernels.triton.linear import lora
from quire.kernels.triton.linear.triton_coded import TritonCoded
from quire.kernels.triton.linear.triton_linear import TritonLinear
from quire.kernels.triton.moe.routing import grouped
from quire.ops.activation import bounded_gated
from quire.ops.moe import ExpertAdapters, MoeArgs
from quire.ops.segments import Addend

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """All experts of a layer: one weight for gate and up, one for down."""

    up: TritonLinear | TritonCoded
    down: TritonLinear | TritonCoded

    @property
    def experts(self) -> int:
        return self.up.weight.shape[0]


@kernel
def _weighted_sum_kernel(
    y: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    count: int,
    C: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out [T, C] = the sum of y [T, TOP_K, C] times weights [T, TOP_K], choice after choice."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token, column = at // C, at % C
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        value = tl.load(y + (token * TOP_K + choice) * C + column, inside, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + token * TOP_K + choice, inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


def moe(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: TritonExperts,
    args: MoeArgs,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `quire.ops.moe.moe`."""
    x, chosen, weights = dense(x), dense(chosen), dense(weights)
    top_k = shared = chosen.shape[1]
    if not len(x):
        return torch.empty_like(x)
    out = torch.empty_like(x)
    if args.weighs_input:
        x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        # the weights are in the rows, which a token's choices no longer share
        weights, shared = torch.ones_like(weights), 1
    # by the mean of an expert's rows: the host does not know the choice
    rows = experts.up.tile_rows(-(-chosen.numel() // experts.experts), x.dtype)
    pairs = grouped(chosen.flatten(), experts.experts, rows)
    slots = None if adapters is None else adapters.of_choices(chosen).flatten()
    up, down = (None, None) if adapters is None else (adapters.up, adapters.down)
    h = experts.up.product(x, _added(x, shared, up, slots), pairs, shared)
    if args.bound is not None:
        h = bounded_gated(h, args.act, args.bound)
    else:
        h = activate(h, args.act, gated=args.gated, limit=args.clamp or 0.0)
    y = experts.down.product(h, _added(h, 1, down, slots), pairs)
    _weighted_sum_kernel[(-(-out.numel() // _BLOCK),)](
        y, weights, out, out.numel(), C=out.shape[1], TOP_K=top_k, BLOCK=_BLOCK
    )
    return out


def _added(x: Tensor, shared: int, bank: Any, slots: Tensor | None) -> Addend | None:
    """The adapters' addend to a product of pairs, of which pair p reads row p // shared of x."""
    if bank is None or slots is None:
        return None
    return lora.addend(x.repeat_interleave(shared, 0) if shared > 1 else x, bank, slots)
