"""What runs the mixers with a recurrent state: projections and the ops of `ops/mixers/state.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.layers import Projection
from quire.ops import LayerState, LinearWeight, NormWeight, Ops, StateBatch


@dataclass(frozen=True, slots=True)
class Convolution:
    """A short convolution with its window: weight [K, W], bias [W]; the window begins at byte
    `start` of a state.
    """

    ops: Ops
    weight: Tensor
    bias: Tensor | None
    act: str | None
    start: int

    def __call__(
        self,
        x: Tensor,
        group: StateBatch,
        state: LayerState,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """x [T, W] -> [T, W], between two gates where they are given; moves the window on."""
        kernel, width = self.weight.shape
        return self.ops.short_conv(
            x,
            state.view(self.start, (kernel - 1, width), x.dtype),
            group.reads,
            group.writes,
            self.weight,
            self.bias,
            self.act,
            before,
            after,
        )


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """LFM2's mixer, out(c * conv(b * x))."""

    ops: Ops
    project: LinearWeight
    conv: Convolution
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        b, c, x = self.ops.linear(h, self.project).chunk(3, 1)
        return self.out(self.conv(x, group, kv, b, c))


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """Mamba's mixer. decay [n, W] and skip [W] fp32; norms of the step's numbers, b and c."""

    ops: Ops
    project: LinearWeight
    conv: Convolution
    select: LinearWeight
    norms: tuple[NormWeight, NormWeight, NormWeight] | None
    step: LinearWeight
    rank: int
    decay: Tensor
    skip: Tensor
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, size = self.ops, self.decay.shape[0]
        x, z = ops.linear(h, self.project).chunk(2, 1)
        x = self.conv(x, group, kv)
        parts = ops.linear(x, self.select).split([self.rank, size, size], 1)
        if self.norms is not None:
            parts = [ops.norm(part, norm) for part, norm in zip(parts, self.norms, strict=True)]
        step, b, c = parts
        y = ops.mamba_scan(
            x,
            ops.linear(step, self.step),
            b,
            c,
            kv.view(0, self.decay.shape, torch.float32),
            group.reads,
            group.writes,
            self.decay,
            self.skip,
            z,
        )
        return self.out(y)


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    """Mamba-2's mixer over `heads` heads, whose states are [n, P]. decay, skip and step_bias [H]
    fp32.
    """

    ops: Ops
    project: LinearWeight
    conv: Convolution
    state: tuple[int, int, int]
    group_width: int
    decay: Tensor
    skip: Tensor
    step_bias: Tensor
    step_limits: tuple[float, float]
    norm: NormWeight | None
    norm_width: int
    gate_first: bool
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, (heads, _, dim) = self.ops, self.state
        width = heads * dim
        widths = [width, width + 2 * self.group_width, heads]
        z, mixed, step = ops.linear(h, self.project).split(widths, 1)
        mixed = self.conv(mixed, group, kv)
        x, b, c = mixed.split([width, self.group_width, self.group_width], 1)
        y = ops.mamba2_scan(
            x,
            step,
            b,
            c,
            kv.view(0, self.state, torch.float32),
            group.reads,
            group.writes,
            self.decay,
            self.skip,
            self.step_bias,
            self.step_limits,
        )
        y = ops.gated_norm(y, z, self.norm, self.norm_width, self.gate_first)
        return self.out(y)


@dataclass(frozen=True, slots=True)
class GatedDeltaLayer:
    """The gated delta net over states [H, N, D]. decay and step_bias [H] fp32."""

    ops: Ops
    project: LinearWeight
    conv: Convolution
    state: tuple[int, int, int]
    keys_width: int
    decay: Tensor
    step_bias: Tensor
    norm: NormWeight
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, keys, (heads, _, dim) = self.ops, self.keys_width, self.state
        widths = [2 * keys + heads * dim, heads * dim, heads, heads]
        mixed, z, b, a = ops.linear(h, self.project).split(widths, 1)
        q, k, v = self.conv(mixed, group, kv).split([keys, keys, heads * dim], 1)
        y = ops.gated_delta(
            q,
            k,
            v,
            a,
            b,
            kv.view(0, self.state, torch.float32),
            group.reads,
            group.writes,
            self.decay,
            self.step_bias,
        )
        y = ops.gated_norm(y, z, self.norm, dim, gate_first=False)
        return self.out(y)
