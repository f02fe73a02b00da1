"""Builds the mixers with a recurrent state from their specs and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.models.maker import Maker
from quire.models.mixers.recurrent.layers import (
    ChannelDeltaLayer,
    Convolution,
    GatedDeltaLayer,
    GatedLinearLayer,
    LightningLayer,
    Mamba2Layer,
    MambaLayer,
    ShortConvLayer,
)
from quire.models.mixers.recurrent.spec import (
    ChannelDelta,
    GatedDelta,
    GatedLinear,
    Lightning,
    Mamba,
    Mamba2,
    RecurrentMixer,
    ShortConv,
)
from quire.ops import HeadsWeight, NormWeight
from quire.ops.activation import row_by_row
from quire.ops.mixers.state import softplus

FLOAT_BYTES = 4


RecurrentLayer = (
    ShortConvLayer
    | MambaLayer
    | Mamba2Layer
    | GatedDeltaLayer
    | ChannelDeltaLayer
    | LightningLayer
    | GatedLinearLayer
)


def make_recurrent(make: Maker, at: str, m: RecurrentMixer) -> RecurrentLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order."""
    if isinstance(m, ShortConv):
        return _short_conv(make, at, m)
    if isinstance(m, Mamba):
        return _mamba(make, at, m)
    if isinstance(m, Mamba2):
        return _mamba2(make, at, m)
    if isinstance(m, GatedDelta):
        return _gated_delta(make, at, m)
    if isinstance(m, ChannelDelta):
        return _channel_delta(make, at, m)
    if isinstance(m, Lightning):
        return _lightning(make, at, m)
    return _gated_linear(make, at, m)


def _short_conv(make: Maker, at: str, m: ShortConv) -> ShortConvLayer:
    return ShortConvLayer(
        make.ops,
        project=make.linear(at + "in", at + "in"),
        conv=_convolution(make, at, m, m.bias, None),
        out=make.row_linear(at + "out", m.width),
    )


def _mamba(make: Maker, at: str, m: Mamba) -> MambaLayer:
    return MambaLayer(
        make.ops,
        project=make.linear(at + "in", at + "in"),
        conv=_convolution(make, at, m, m.conv_bias, "silu"),
        select=make.linear(at + "select", at + "select"),
        norms=_selection_norms(make, at, m),
        step=make.linear(at + "step", at + "step"),
        rank=m.rank,
        decay=make.tensor(
            at + "decay_log", torch.float32, lambda leaf: _decay(leaf).t().contiguous()
        ),
        skip=make.tensor(at + "skip", torch.float32),
        out=make.row_linear(at + "out", m.width),
    )


def _selection_norms(
    make: Maker, at: str, m: Mamba
) -> tuple[NormWeight, NormWeight, NormWeight] | None:
    if m.norm_eps is None:
        return None

    def norm(part: str, width: int) -> NormWeight:
        assert m.norm_eps is not None
        if m.norm_weights:
            return NormWeight("rms", m.norm_eps, make.tensor(f"{at}{part}_norm.weight"))
        return NormWeight("rms", m.norm_eps, make.ones(width))

    return norm("step", m.rank), norm("b", m.state), norm("c", m.state)


def _mamba2(make: Maker, at: str, m: Mamba2) -> Mamba2Layer:
    return Mamba2Layer(
        make.ops,
        project=make.linear(at + "in", *(at + part for part in ("z", "x", "b", "c", "step"))),
        conv=_convolution(make, at, m, m.conv_bias, "silu"),
        state=(m.heads, m.state, m.head_dim),
        group_width=m.groups * m.state,
        decay=make.tensor(at + "decay_log", torch.float32, _decay),
        skip=make.tensor(at + "skip", torch.float32),
        step_bias=make.tensor(at + "step_bias", torch.float32),
        step_limits=(m.least_step, m.largest_step),
        norm=None if m.norm_eps is None else _gated_norm(make, at, m.norm_eps),
        norm_width=m.width // m.norm_groups,
        gate_first=m.gate_first,
        out=make.row_linear(at + "out", m.heads),
    )


def _gated_delta(make: Maker, at: str, m: GatedDelta) -> GatedDeltaLayer:
    return GatedDeltaLayer(
        make.ops,
        project=make.linear(at + "in", *(at + part for part in ("q", "k", "v", "z", "b", "a"))),
        conv=_convolution_of_parts(make, at, m),
        state=(m.value_heads, m.key_dim, m.value_dim),
        keys_width=m.keys_width,
        decay=make.tensor(at + "decay_log", torch.float32, _decay),
        step_bias=make.tensor(at + "step_bias", torch.float32),
        norm=_gated_norm(make, at, m.norm_eps),
        out=make.row_linear(at + "out", m.value_heads),
        scan=_delta_rule(make, m.strength),
    )


def _delta_rule(make: Maker, strength: float) -> Callable[..., Tensor]:
    """The op of the rule; the faster one knows no other strength than 1."""
    if strength == 1.0:
        return make.ops.gated_delta
    return partial(make.ops.channel_delta, strength=strength)


def _channel_delta(make: Maker, at: str, m: ChannelDelta) -> ChannelDeltaLayer:
    last = ("a", "z") if m.rank is None else ("a_down", "z_down")
    project = make.linear(at + "in", *(at + part for part in ("q", "k", "v", "b", *last)))
    expand = None if m.rank is None else [make.linear(at + part, at + part) for part in ("a", "z")]
    return ChannelDeltaLayer(
        make.ops,
        project=project,
        decays=None if expand is None else expand[0],
        gates=None if expand is None else expand[1],
        conv=_convolution_of_parts(make, at, m),
        state=(m.heads, m.head_dim, m.head_dim),
        decay=make.tensor(at + "decay_log", torch.float32, _decay),
        step_bias=make.tensor(at + "step_bias", torch.float32),
        bound=m.bound,
        rank=m.rank,
        norm=_gated_norm(make, at, m.norm_eps),
        out=make.row_linear(at + "out", m.heads),
    )


def _lightning(make: Maker, at: str, m: Lightning) -> LightningLayer:
    project = make.linear(at + "in", *(at + part for part in ("q", "k", "v")))
    # the slopes of ALiBi, times the layer's own factor
    slopes = [m.slope * 2 ** (-8 * i / m.heads) for i in range(1, m.heads + 1)]
    return LightningLayer(
        make.ops,
        project=project,
        act=m.act,
        state=(m.heads, m.head_dim, m.head_dim),
        decay=torch.tensor(slopes, dtype=torch.float32, device=make.device).neg(),
        zeros=torch.zeros(m.heads, dtype=torch.float32, device=make.device),
        gates=make.linear(at + "z", at + "z"),
        norm=_gated_norm(make, at, m.norm_eps),
        out=make.row_linear(at + "out", m.heads),
    )


def _gated_linear(make: Maker, at: str, m: GatedLinear) -> GatedLinearLayer:
    return GatedLinearLayer(
        make.ops,
        inputs=make.linear(at + "x", at + "x"),
        gate=make.linear(at + "y", at + "y"),
        conv=_convolution(make, at, m, True, None),
        # -8 is the constant c of Griffin's paper
        rate=make.tensor(at + "rate", torch.float32, lambda leaf: -8.0 * _each(softplus, leaf)),
        gates=_block_gates(make, at),
        gate_bias=_gate_bias(make, at),
        act=m.act,
        out=make.row_linear(at + "out", m.width),
    )


def _block_gates(make: Maker, at: str) -> HeadsWeight:
    """Weights [K, inputs, outputs] of both gates as one [K, 2 * outputs, inputs]."""
    both = [make.weights.tensor(f"{at}{part}.weight") for part in ("enter", "keep")]
    packed: HeadsWeight = make.ops.pack_heads(torch.cat([w.transpose(1, 2) for w in both], 1))
    make.keep(at + "gates", packed)
    return packed


def _gate_bias(make: Maker, at: str) -> Tensor:
    leaves = (make.weights.tensor(f"{at}{part}.bias") for part in ("enter", "keep"))
    bias = torch.stack([leaf.flatten() for leaf in leaves]).float()
    make.keep(at + "gate_bias", bias)
    return bias


def _convolution(
    make: Maker, at: str, m: RecurrentMixer, has_bias: bool, act: str | None
) -> Convolution:
    return Convolution(
        make.ops,
        weight=make.tensor(at + "conv.weight", change=lambda leaf: leaf[:, 0].t().contiguous()),
        bias=make.tensor(at + "conv.bias") if has_bias else None,
        act=act,
        start=FLOAT_BYTES * m.memory.wide_numbers,
    )


def _convolution_of_parts(make: Maker, at: str, m: GatedDelta | ChannelDelta) -> Convolution:
    """One convolution over queries, keys and values, whose kernels are leaves of their own."""
    weight = make.weights.merged([f"{at}{part}_conv.weight" for part in "qkv"])
    weight = weight[:, 0].t().contiguous()
    make.keep(at + "conv.weight", weight)
    return Convolution(
        make.ops, weight, bias=None, act="silu", start=FLOAT_BYTES * m.memory.wide_numbers
    )


def _gated_norm(make: Maker, at: str, eps: float) -> NormWeight:
    return NormWeight("rms", eps, make.tensor(at + "norm.weight"))


def _decay(leaf: Tensor) -> Tensor:
    return -_each(torch.exp, leaf)


def _each(function: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """Apply a function to each number: the same bits whether a worker has all or a part."""
    return row_by_row(function, leaf.reshape(1, -1)).view(leaf.shape)
