"""Mixers with a recurrent state as the pseudo-code of `quire show`. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

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


def describe(m: RecurrentMixer) -> Iterator[str]:
    """Lines from h, the normed input, to h, the output."""
    if isinstance(m, ShortConv):
        yield from _short_conv(m)
    elif isinstance(m, Mamba):
        yield from _mamba(m)
    elif isinstance(m, Mamba2):
        yield from _mamba2(m)
    elif isinstance(m, GatedDelta):
        yield from _gated_delta(m)
    elif isinstance(m, ChannelDelta):
        yield from _channel_delta(m)
    elif isinstance(m, Lightning):
        yield from _lightning(m)
    else:
        yield from _gated_linear(m)


def _short_conv(m: ShortConv) -> Iterator[str]:
    bias = " + bias" if m.bias else ""
    yield f"b, c, x = W @ h{bias}    # {m.width:,} channels each"
    yield f"h = Wo @ (c * conv(b * x)){bias}    # over {m.kernel} tokens"


def _mamba(m: Mamba) -> Iterator[str]:
    bias = " + bias" if m.bias else ""
    yield f"x, z = W @ h{bias}    # {m.width:,} channels each"
    yield f"x = silu(conv(x))    # over {m.kernel} tokens"
    normed = "" if m.norm_eps is None else f" each by rms_norm[eps {m.norm_eps:g}]"
    yield f"d, b, c = Ws @ x{normed}    # {m.rank}, {m.state} and {m.state} numbers"
    yield "d = softplus(Wd @ d + bias)    # a step per channel"
    yield f"s = e^(-e^a * d) * s + d * b * x    # a state of {m.state} x {m.width:,} numbers"
    yield f"h = Wo @ ((c . s + skip * x) * silu(z)){bias}"


def _mamba2(m: Mamba2) -> Iterator[str]:
    groups = f"{m.groups} group{'s' if m.groups > 1 else ''} of {m.state}"
    yield f"z, x, b, c, d = W @ h    # {m.heads} heads of {m.head_dim}; b and c: {groups}"
    yield f"x, b, c = silu(conv(x, b, c))    # over {m.kernel} tokens"
    yield "d = softplus(d + bias)    # a step per head"
    size = f"{m.heads} states of {m.state} x {m.head_dim} numbers"
    yield f"s = e^(-e^a * d) * s + d * b x    # {size}"
    yield f"h = Wo @ {_gated(m)}"


def _gated(m: Mamba2) -> str:
    y, gate = "(c s + skip * x)", "silu(z)"
    if m.norm_eps is None:
        return f"({y} * {gate})"
    norm = f"rms_norm[eps {m.norm_eps:g}]"
    return f"{norm}({y} * {gate})" if m.gate_first else f"({norm}{y} * {gate})"


def _gated_delta(m: GatedDelta) -> Iterator[str]:
    keys, values = f"{m.key_heads} heads of {m.key_dim}", f"{m.value_heads} of {m.value_dim}"
    yield f"q, k, v, z, b, a = W @ h    # q and k: {keys}; v and z: {values}"
    yield f"q, k, v = silu(conv(q, k, v))    # over {m.kernel} tokens"
    strength = "" if m.strength == 1 else f"{m.strength:g} * "
    yield f"q, k = q / |q|, k / |k|; b = {strength}sigmoid(b); g = -e^d * softplus(a + bias)"
    yield f"s = e^g * s    # {m.value_heads} states of {m.key_dim} x {m.value_dim} numbers"
    yield "s = s + k (b * (v - k s))"
    yield f"h = Wo @ (rms_norm[eps {m.norm_eps:g}](q s) * silu(z))"


def _channel_delta(m: ChannelDelta) -> Iterator[str]:
    rank = "" if m.rank is None else f"; a and z through {m.rank} numbers each"
    yield f"q, k, v, b, a, z = W @ h    # {m.heads} heads of {m.head_dim}{rank}"
    yield f"q, k, v = silu(conv(q, k, v))    # over {m.kernel} tokens"
    g = "-e^d * softplus(a + bias)"
    if m.bound is not None:
        g = f"{m.bound:g} * sigmoid(e^d * (a + bias))"
    yield f"q, k = q / |q|, k / |k|; b = sigmoid(b); g = {g}"
    yield f"s = e^g * s    # {m.heads} states of {m.head_dim} x {m.head_dim} numbers, g by channel"
    yield "s = s + k (b * (v - k s))"
    yield f"h = Wo @ (rms_norm[eps {m.norm_eps:g}](q s) * sigmoid(z))"


def _lightning(m: Lightning) -> Iterator[str]:
    yield f"q, k, v = {m.act}(W @ h)    # {m.heads} heads of {m.head_dim}"
    size = f"{m.heads} states of {m.head_dim} x {m.head_dim} numbers"
    yield f"s = e^(-{m.slope:g} * slope) * s + k v    # {size}"
    yield f"h = Wo @ (rms_norm[eps {m.norm_eps:g}](q s) * sigmoid(Wz @ h))    # over all heads"


def _gated_linear(m: GatedLinear) -> Iterator[str]:
    yield f"x, y = W @ h + bias    # {m.width:,} channels each"
    yield f"x = conv(x) + bias    # over {m.kernel} tokens"
    yield f"i, r = sigmoid(Wi @ x + bias), sigmoid(Wr @ x + bias)    # in {m.gate_blocks} blocks"
    yield "g = e^(-8 * softplus(a) * r)"
    yield f"s = g * s + sqrt(1 - g^2) * i * x    # a state of {m.width:,} numbers"
    yield f"h = Wo @ (s * {m.act}(y)) + bias"
