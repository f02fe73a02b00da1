"""The parameters of mixers with a recurrent state: name, shape and kind, in load order. Free of
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

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

LeafKind = Literal["matrix", "bias", "norm", "decay"]
"""decay: the logarithm of a positive number."""


class Leaf(NamedTuple):
    """`heads`: how many heads the first axis consists of, 1 where it has none."""

    name: str
    shape: tuple[int, ...]
    kind: LeafKind
    heads: int = 1


def leaves(m: RecurrentMixer, dim: int) -> Iterator[Leaf]:
    """The leaves of the mixer in a decoder of width `dim`."""
    if isinstance(m, ShortConv):
        yield from _short_conv(m, dim)
    elif isinstance(m, Mamba):
        yield from _mamba(m, dim)
    elif isinstance(m, Mamba2):
        yield from _mamba2(m, dim)
    elif isinstance(m, GatedDelta):
        yield from _gated_delta(m, dim)
    elif isinstance(m, ChannelDelta):
        yield from _channel_delta(m, dim)
    elif isinstance(m, Lightning):
        yield from _lightning(m, dim)
    else:
        yield from _gated_linear(m, dim)


def _short_conv(m: ShortConv, dim: int) -> Iterator[Leaf]:
    yield from _linear("in", 3 * m.width, dim, m.bias)
    yield from _convolution(m.width, m.kernel, m.bias)
    yield from _linear("out", dim, m.width, m.bias)


def _mamba(m: Mamba, dim: int) -> Iterator[Leaf]:
    yield from _linear("in", 2 * m.width, dim, m.bias)
    yield from _convolution(m.width, m.kernel, m.conv_bias)
    yield from _linear("select", m.rank + 2 * m.state, m.width, False)
    if m.norm_weights:
        for part, width in (("step", m.rank), ("b", m.state), ("c", m.state)):
            yield Leaf(f"{part}_norm.weight", (width,), "norm")
    yield from _linear("step", m.width, m.rank, True)
    yield Leaf("decay_log", (m.width, m.state), "decay")
    yield Leaf("skip", (m.width,), "norm")
    yield from _linear("out", dim, m.width, m.bias)


def _mamba2(m: Mamba2, dim: int) -> Iterator[Leaf]:
    groups = m.groups * m.state
    widths = {"z": m.width, "x": m.width, "b": groups, "c": groups, "step": m.heads}
    for part, width in widths.items():
        yield from _linear(part, width, dim, m.bias)
    yield from _convolution(m.conv_width, m.kernel, m.conv_bias)
    yield Leaf("decay_log", (m.heads,), "decay")
    yield Leaf("skip", (m.heads,), "norm")
    yield Leaf("step_bias", (m.heads,), "bias")
    if m.norm_eps is not None:
        yield Leaf("norm.weight", (m.width,), "norm")
    yield from _linear("out", dim, m.width, m.out_bias)


def _gated_delta(m: GatedDelta, dim: int) -> Iterator[Leaf]:
    widths = {"q": m.keys_width, "k": m.keys_width, "v": m.width, "z": m.width}
    for part, width in {**widths, "b": m.value_heads, "a": m.value_heads}.items():
        yield from _linear(part, width, dim, False, m.key_heads)
    for part, width in (("q", m.keys_width), ("k", m.keys_width), ("v", m.width)):
        yield Leaf(f"{part}_conv.weight", (width, 1, m.kernel), "matrix")
    yield Leaf("decay_log", (m.value_heads,), "decay")
    yield Leaf("step_bias", (m.value_heads,), "bias")
    yield Leaf("norm.weight", (m.value_dim,), "norm")
    yield from _linear("out", dim, m.width, False)


def _channel_delta(m: ChannelDelta, dim: int) -> Iterator[Leaf]:
    for part in ("q", "k", "v"):
        yield from _linear(part, m.width, dim, False, m.heads)
    yield from _linear("b", m.heads, dim, False, m.heads)
    for part in ("a", "z"):
        if m.rank is None:
            yield from _linear(part, m.width, dim, False, m.heads)
        else:
            yield from _linear(f"{part}_down", m.rank, dim, False)
    if m.rank is not None:
        for part in ("a", "z"):
            yield from _linear(part, m.width, m.rank, False, m.heads)
    for part in ("q", "k", "v"):
        yield Leaf(f"{part}_conv.weight", (m.width, 1, m.kernel), "matrix")
    yield Leaf("decay_log", (m.heads,), "decay")
    yield Leaf("step_bias", (m.width,), "bias")
    yield Leaf("norm.weight", (m.head_dim,), "norm")
    yield from _linear("out", dim, m.width, False)


def _lightning(m: Lightning, dim: int) -> Iterator[Leaf]:
    for part in ("q", "k", "v"):
        yield from _linear(part, m.width, dim, False, m.heads)
    yield from _linear("z", m.width, dim, False, m.heads)
    yield Leaf("norm.weight", (m.width,), "norm")
    yield from _linear("out", dim, m.width, False)


def _gated_linear(m: GatedLinear, dim: int) -> Iterator[Leaf]:
    block = m.width // m.gate_blocks
    yield from _linear("x", m.width, dim, True)
    yield from _linear("y", m.width, dim, True)
    yield from _convolution(m.width, m.kernel, True)
    yield Leaf("rate", (m.width,), "bias")
    for part in ("enter", "keep"):
        yield Leaf(f"{part}.weight", (m.gate_blocks, block, block), "matrix")
        yield Leaf(f"{part}.bias", (m.gate_blocks, block), "bias")
    yield from _linear("out", dim, m.width, True)


def _linear(name: str, outputs: int, inputs: int, bias: bool, heads: int = 1) -> Iterator[Leaf]:
    yield Leaf(name + ".weight", (outputs, inputs), "matrix", heads)
    if bias:
        yield Leaf(name + ".bias", (outputs,), "bias")


def _convolution(width: int, kernel: int, bias: bool) -> Iterator[Leaf]:
    yield Leaf("conv.weight", (width, 1, kernel), "matrix")
    if bias:
        yield Leaf("conv.bias", (width,), "bias")
