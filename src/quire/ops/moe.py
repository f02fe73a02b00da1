"""Mixture of experts: packing at load, and the feed-forward layers of the chosen experts.

They belong to the format "linear", whose providers pack the experts' weights. Which experts a token
is sent to is the op `route` (routing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.ops.activation import ACTIVATIONS, bounded_gated, gated, gated_with_limit
from quire.ops.formats.coded import CodedWeight
from quire.ops.formats.lora import NO_ADAPTER, Bank, lora
from quire.ops.formats.row_stack import RowStack
from quire.ops.linear import pack_linear
from quire.ops.quantized import WeightFormat
from quire.ops.registry import op


@dataclass(frozen=True, slots=True)
class MoeArgs:
    """The function of an expert: down(act(gate) * up), or down(act(up)) if not `gated`.

    clamp: gpt-oss's limited gate instead of `act`. bound: that of `bounded_gated`. weighs_input:
    the weight of a choice multiplies the expert's input, not its result (Llama 4).
    """

    act: str = "silu"
    gated: bool = True
    clamp: float | None = None
    weighs_input: bool = False
    bound: float | None = None

    def __post_init__(self) -> None:
        assert self.clamp is None or (self.act == "silu" and self.gated)
        assert self.bound is None or (self.clamp is None and self.gated)


ADDRESSES = {"addresses": True}
"""The metadata of a dataclass's field whose tensor has places in memory, and not values."""


class ExpertWeights(Protocol):
    """The packed weights of all experts of a layer."""

    @property
    def experts(self) -> int:
        """Count of the experts."""


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """One gate/up and one down weight per expert, in plain torch's format of such weights: views of
    the packed tensors where nothing is rounded.
    """

    experts: int
    up: tuple[Any, ...]
    down: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of a layer's experts: a bank of the gate/up products and one of the down
    products (None: they have no adapters), and the slots [T] int32 of the tokens. In a bank, the
    adapter in slot s has that of expert e, of E, in slot s * E + e.
    """

    up: Bank | None
    down: Bank | None
    experts: int
    slots: Tensor

    def of_choices(self, chosen: Tensor) -> Tensor:
        """The slots in the banks [T, k] int32 of the tokens' choices [T, k]."""
        slots = self.slots[:, None]
        return torch.where(slots < 0, NO_ADAPTER, slots * self.experts + chosen.int())


Experts = Tensor | Sequence[RowStack] | Sequence[CodedWeight]
"""The weights [E, out, in] of experts, or one for each of them."""
Expert = Callable[[int, Tensor, "Tensor | None"], Tensor]
"""An expert's number, rows [n, C], and their slots in banks of experts [n], where they may have
adapters -> [n, C]."""


@op(format="linear")
def pack_experts(
    up: Tensor | Sequence[CodedWeight],
    down: Tensor | Sequence[CodedWeight],
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    stored_as: WeightFormat | None = None,
    segments: int = 1,
    gated: bool = False,
) -> SeparateExperts:
    """Take up [E, 2F, C] (gate rows, then up rows; [E, F, C] where there is no gate), down [E, C,
    F] and biases [E, 2F] or [E, F], and [E, C] into the format; `stored_as` is that of
    `pack_linear`, `segments` those of down's inputs. `gated`: for `moe` with gates alone, see
    `pack_linear`. Weights of codes are one for each expert.

    Plain torch keeps the caller's tensors (no copy) where they are not rounded.
    """
    assert len(down) == len(up) and down[0].shape[0] == up[0].shape[1]
    assert up[0].shape[0] in (down[0].shape[1], 2 * down[0].shape[1])
    pack_up = partial(pack_linear.definition, gated=gated)
    pack_down = partial(pack_linear.definition, segments=segments)
    return SeparateExperts(
        len(up),
        pack_each(pack_up, up, up_bias, stored_as),
        pack_each(pack_down, down, down_bias, stored_as),
    )


def pack_each(
    pack: Callable[..., Any],
    weight: Experts,
    bias: Tensor | None,
    stored_as: WeightFormat | None,
) -> tuple[Any, ...]:
    """The experts of weight [E, out, in] and bias [E, out], each packed by itself."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    return tuple(pack(w, b, stored_as) for w, b in zip(weight, biases, strict=True))


@op(axes={"x": 0, "chosen": 0, "weights": 0}, format="linear")
def moe(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: SeparateExperts,
    args: MoeArgs,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """The chosen experts' results on each token, weighed and summed in fp32 in the order of the
    choice: x [T, C], chosen [T, k] int32, weights [T, k] fp32 -> [T, C]. `adapters` add to the
    products of experts.
    """

    def expert(index: int, rows: Tensor, slots: Tensor | None) -> Tensor:
        up, down = experts.up[index], experts.down[index]
        if adapters is None or slots is None:
            return down.multiply(_activated(up.multiply(rows), args))
        added = None if adapters.up is None else lora(rows, adapters.up, slots)
        hidden = _activated(up.multiply(rows, added), args)
        added = None if adapters.down is None else lora(hidden, adapters.down, slots)
        result: Tensor = down.multiply(hidden, added)
        return result

    return mixture(x, chosen, weights, experts.experts, args, expert, adapters)


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    num_experts: int,
    args: MoeArgs,
    expert: Expert,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """`moe` for an expert."""

    def run(rows: Tensor, counts: list[int]) -> Tensor:
        own: Sequence[Tensor | None] = [None] * num_experts
        if adapters is not None:
            own = adapters.of_choices(chosen).flatten()[by_expert(chosen)].split(counts)
        parts = zip(rows.split(counts), own, strict=True)
        found = [expert(i, part, its) for i, (part, its) in enumerate(parts) if len(part)]
        return torch.cat(found) if found else rows

    return grouped_mixture(x, chosen, weights, num_experts, args, run)


def grouped_mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    num_experts: int,
    args: MoeArgs,
    run: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """`moe` for `run(rows [T*k, C], counts [E]) -> [T*k, C]`: all chosen experts at once, the first
    counts[0] rows for expert 0 and so on.
    """
    (num_tokens, width), top_k = x.shape, chosen.shape[1]
    order = by_expert(chosen)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
    rows = x[order // top_k]
    if args.weighs_input:
        rows = rows * weights.flatten()[order, None].to(x.dtype)
        weights = torch.ones_like(weights)
    results = x.new_empty(num_tokens * top_k, width)
    results.index_copy_(0, order, run(rows, counts))
    return weighted_sum(results.view(num_tokens, top_k, width), weights).to(x.dtype)


def by_expert(chosen: Tensor) -> Tensor:
    """The pairs of a token and a choice [T*k], grouped by expert."""
    return chosen.flatten().argsort(stable=True)


def _activated(h: Tensor, args: MoeArgs) -> Tensor:
    if args.clamp is not None:
        return gated_with_limit(h, args.clamp)
    if args.bound is not None:
        return bounded_gated(h, args.act, args.bound)
    return gated(h, args.act) if args.gated else ACTIVATIONS[args.act](h)


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """y [T, k, C] times weights [T, k], added one choice after the other, in the weights' type ->
    [T, C].
    """
    total = y[:, 0] * weights[:, 0, None]
    for i in range(1, y.shape[1]):
        total += y[:, i] * weights[:, i, None]
    return total
