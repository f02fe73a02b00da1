"""Builds the mixers with a recurrent state from their specs and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.maker import Maker
from quire.models.mixers.recurrent.layers import (
    Convolution,
    GatedDeltaLayer,
    Mamba2Layer,
    MambaLayer,
    ShortConvLayer,
)
from quire.models.mixers.recurrent.spec import GatedDelta, Mamba, Mamba2, RecurrentMixer, ShortConv
from quire.ops import NormWeight

FLOAT_BYTES = 4


def make_recurrent(
    make: Maker, at: str, m: RecurrentMixer
) -> ShortConvLayer | MambaLayer | Mamba2Layer | GatedDeltaLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order."""
    if isinstance(m, ShortConv):
        return _short_conv(make, at, m)
    if isinstance(m, Mamba):
        return _mamba(make, at, m)
    if isinstance(m, Mamba2):
        return _mamba2(make, at, m)
    return _gated_delta(make, at, m)


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
        conv=_convolution(make, at, m, False, "silu"),
        state=(m.value_heads, m.key_dim, m.value_dim),
        keys_width=m.keys_width,
        decay=make.tensor(at + "decay_log", torch.float32, _decay),
        step_bias=make.tensor(at + "step_bias", torch.float32),
        norm=_gated_norm(make, at, m.norm_eps),
        out=make.row_linear(at + "out", m.value_heads),
    )


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


def _gated_norm(make: Maker, at: str, eps: float) -> NormWeight:
    return NormWeight("rms", eps, make.tensor(at + "norm.weight"))


def _decay(leaf: Tensor) -> Tensor:
    return -torch.exp(leaf)
