"""The parameters of recurrent mixers: name, shape and kind, in load order. Free of torch."""

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


LeafRole = Literal["column", "row", "replicated"]
"""The axis that is split over workers, as in `Parameter`."""

Sections = tuple[tuple[int, int], ...]
"""Runs of rows, each split by itself: how many rows, and the units between cuts."""


class Leaf(NamedTuple):
    """`heads`: how many heads the first axis consists of, 1 where it has none."""

    name: str
    shape: tuple[int, ...]
    kind: LeafKind
    heads: int = 1
    role: LeafRole = "replicated"
    sections: Sections = ()


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
    three = ((m.width, m.width),) * 3
    yield from _linear("in", 3 * m.width, dim, m.bias, role="column", sections=three)
    yield from _convolution(m.width, m.kernel, m.bias, role="column")
    yield from _linear("out", dim, m.width, m.bias, role="row")


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
    # heads of one worker need the b and c of their group, which may be other workers', too
    of_heads, of_groups = (m.width, m.heads), (m.groups * m.state, m.groups)
    parts = {"z": of_heads, "x": of_heads, "b": of_groups, "c": of_groups, "step": (m.heads,) * 2}
    for part, own in parts.items():
        yield from _linear(part, own[0], dim, m.bias, role="column", sections=(own,))
    mixed = (of_heads, of_groups, of_groups)
    yield from _convolution(m.conv_width, m.kernel, m.conv_bias, role="column", sections=mixed)
    yield Leaf("decay_log", (m.heads,), "decay", role="column")
    yield Leaf("skip", (m.heads,), "norm", role="column")
    yield Leaf("step_bias", (m.heads,), "bias", role="column")
    if m.norm_eps is not None:
        yield Leaf("norm.weight", (m.width,), "norm", role="column")
    yield from _linear("out", dim, m.width, m.out_bias, role="row")


def _gated_delta(m: GatedDelta, dim: int) -> Iterator[Leaf]:
    widths = {"q": m.keys_width, "k": m.keys_width, "v": m.width, "z": m.width}
    for part, width in {**widths, "b": m.value_heads, "a": m.value_heads}.items():
        yield from _linear(part, width, dim, False, m.key_heads, role="column")
    for part, width in (("q", m.keys_width), ("k", m.keys_width), ("v", m.width)):
        yield Leaf(f"{part}_conv.weight", (width, 1, m.kernel), "matrix", role="column")
    yield Leaf("decay_log", (m.value_heads,), "decay", role="column")
    yield Leaf("step_bias", (m.value_heads,), "bias", role="column")
    yield Leaf("norm.weight", (m.value_dim,), "norm")
    yield from _linear("out", dim, m.width, False, role="row")


def _channel_delta(m: ChannelDelta, dim: int) -> Iterator[Leaf]:
    for part in ("q", "k", "v"):
        yield from _linear(part, m.width, dim, False, m.heads, role="column")
    yield from _linear("b", m.heads, dim, False, m.heads, role="column")
    for part in ("a", "z"):
        if m.rank is None:
            yield from _linear(part, m.width, dim, False, m.heads, role="column")
        else:
            yield from _linear(f"{part}_down", m.rank, dim, False)
    if m.rank is not None:
        for part in ("a", "z"):
            yield from _linear(part, m.width, m.rank, False, m.heads, role="column")
    for part in ("q", "k", "v"):
        yield Leaf(f"{part}_conv.weight", (m.width, 1, m.kernel), "matrix", role="column")
    yield Leaf("decay_log", (m.heads,), "decay", role="column")
    yield Leaf("step_bias", (m.width,), "bias", role="column")
    yield Leaf("norm.weight", (m.head_dim,), "norm")
    yield from _linear("out", dim, m.width, False, role="row")


def _lightning(m: Lightning, dim: int) -> Iterator[Leaf]:
    for part in ("q", "k", "v"):
        yield from _linear(part, m.width, dim, False, m.heads)
    yield from _linear("z", m.width, dim, False, m.heads)
    yield Leaf("norm.weight", (m.width,), "norm")
    yield from _linear("out", dim, m.width, False)


def _gated_linear(m: GatedLinear, dim: int) -> Iterator[Leaf]:
    block = m.width // m.gate_blocks
    yield from _linear("x", m.width, dim, True, role="column")
    yield from _linear("y", m.width, dim, True, role="column")
    yield from _convolution(m.width, m.kernel, True, role="column")
    yield Leaf("rate", (m.width,), "bias", role="column")
    for part in ("enter", "keep"):
        yield Leaf(f"{part}.weight", (m.gate_blocks, block, block), "matrix", role="column")
        yield Leaf(f"{part}.bias", (m.gate_blocks, block), "bias", role="column")
    yield from _linear("out", dim, m.width, True, role="row")


def _linear(
    name: str,
    outputs: int,
    inputs: int,
    bias: bool,
    heads: int = 1,
    *,
    role: LeafRole = "replicated",
    sections: Sections = (),
) -> Iterator[Leaf]:
    yield Leaf(name + ".weight", (outputs, inputs), "matrix", heads, role, sections)
    if bias:  # which a sum over workers must add once
        cut: LeafRole = "replicated" if role == "row" else role
        yield Leaf(name + ".bias", (outputs,), "bias", 1, cut, sections)


def _convolution(
    width: int,
    kernel: int,
    bias: bool,
    *,
    role: LeafRole = "replicated",
    sections: Sections = (),
) -> Iterator[Leaf]:
    yield Leaf("conv.weight", (width, 1, kernel), "matrix", 1, role, sections)
    if bias:
        yield Leaf("conv.bias", (width,), "bias", 1, role, sections)
