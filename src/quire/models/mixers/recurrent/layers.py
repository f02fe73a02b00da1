"""Mixers with a recurrent state: projections and the ops of `ops/mixers/state.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.layers import Projection
from quire.ops import HeadsWeight, LayerState, LinearWeight, NormWeight, Ops, StateBatch


@dataclass(frozen=True, slots=True)
class Convolution:
    """A short convolution with weight [K, W] and bias [W]; its window is at byte `start`."""

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
    """Mamba-2's mixer over `heads` heads of states [n, P]. decay, skip, step_bias [H] fp32."""

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
    """The gated delta net over states [H, N, D]. decay, step_bias [H] fp32. `scan`: its op."""

    ops: Ops
    project: LinearWeight
    conv: Convolution
    state: tuple[int, int, int]
    keys_width: int
    decay: Tensor
    step_bias: Tensor
    norm: NormWeight
    out: Projection
    scan: Callable[..., Tensor]

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, keys, (heads, _, dim) = self.ops, self.keys_width, self.state
        widths = [2 * keys + heads * dim, heads * dim, heads, heads]
        mixed, z, b, a = ops.linear(h, self.project).split(widths, 1)
        q, k, v = self.conv(mixed, group, kv).split([keys, keys, heads * dim], 1)
        y = self.scan(
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


@dataclass(frozen=True, slots=True)
class ChannelDeltaLayer:
    """The delta rule with decays by channel over states [H, N, N]. decay [H] and step_bias [H*N]
    fp32; `decays` and `gates` make those of what `project` leaves of low rank, or else it makes
    them itself.
    """

    ops: Ops
    project: LinearWeight
    conv: Convolution
    state: tuple[int, int, int]
    decay: Tensor
    step_bias: Tensor
    bound: float | None
    rank: int | None
    decays: LinearWeight | None
    gates: LinearWeight | None
    norm: NormWeight
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, (heads, _, dim) = self.ops, self.state
        width = heads * dim
        own = width if self.rank is None else self.rank
        mixed, b, a, z = ops.linear(h, self.project).split([3 * width, heads, own, own], 1)
        if self.decays is not None and self.gates is not None:
            a, z = ops.linear(a, self.decays), ops.linear(z, self.gates)
        q, k, v = self.conv(mixed, group, kv).chunk(3, 1)
        y = ops.channel_delta(
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
            self.bound,
        )
        y = ops.norm(y.unflatten(1, (heads, dim)), self.norm).flatten(1)
        return self.out(ops.scale_gate(y, z))


@dataclass(frozen=True, slots=True)
class LightningLayer:
    """Linear attention with fixed decays over states [H, N, N], as the scan of Mamba-2 whose steps
    are all 1: decay [H] fp32, skip and step_bias zeros.
    """

    ops: Ops
    project: LinearWeight
    act: str
    state: tuple[int, int, int]
    decay: Tensor
    zeros: Tensor
    norm: NormWeight
    gates: LinearWeight
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, (heads, _, _) = self.ops, self.state
        q, k, v = ops.hidden(h, self.project, self.act, False).chunk(3, 1)
        y = ops.mamba2_scan(
            v,
            q[:, :heads],  # any numbers: the limits make 1 of them
            k,
            q,
            kv.view(0, self.state, torch.float32),
            group.reads,
            group.writes,
            self.decay,
            self.zeros,
            self.zeros,
            (1.0, 1.0),
        )
        return self.out(ops.scale_gate(ops.norm(y, self.norm), ops.linear(h, self.gates)))


@dataclass(frozen=True, slots=True)
class GatedLinearLayer:
    """Griffin's recurrent block. rate [W] and gate_bias [2, W] fp32."""

    ops: Ops
    inputs: LinearWeight
    gate: LinearWeight
    conv: Convolution
    gates: HeadsWeight
    rate: Tensor
    gate_bias: Tensor
    act: str
    out: Projection

    def __call__(self, h: Tensor, positions: Tensor, group: StateBatch, kv: LayerState) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, (width,) = self.ops, self.rate.shape
        x = self.conv(ops.linear(h, self.inputs), group, kv)
        blocks = self.gates.heads
        made = ops.heads_linear(x.unflatten(1, (blocks, -1)), self.gates)
        x = ops.gated_linear(
            x,
            made,
            kv.view(0, (width,), torch.float32),
            group.reads,
            group.writes,
            positions,
            self.rate,
            self.gate_bias,
        )
        return self.out(ops.modulate(ops.linear(h, self.gate), x, self.act))
