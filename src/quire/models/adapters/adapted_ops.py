"""Ops that know adapters: a product whose weight comes with a bank also adds what the adapters of
its rows say. So mixers, feed-forward parts and heads are adapted as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.models.adapters.banks import AdapterBanks
from quire.ops import ExpertWeights, LinearWeight, MoeArgs, Ops
from quire.ops.formats.lora import Bank
from quire.ops.moe import ExpertAdapters


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A packed weight with the bank of its adapters; a table of embeddings may be a tensor."""

    weight: LinearWeight | Tensor
    bank: Bank

    @property
    def in_features(self) -> int:
        return self.bank.shape.in_features

    @property
    def out_features(self) -> int:
        return self.bank.shape.out_features

    @property
    def segments(self) -> int:
        return self.bank.shape.segments


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """The packed experts of a layer with the banks of their two products (`ExpertAdapters`)."""

    experts: int
    weights: ExpertWeights
    up: Bank | None
    down: Bank | None


class _Products:
    """The ops of products; see quire.ops for each."""

    def __init__(self, ops: Ops, banks: AdapterBanks) -> None:
        self._ops, self._banks = ops, banks

    def _split(self, x: Tensor, w: Any) -> tuple[Any, Any]:
        """A weight as the ops have it, and what adapters add to its product."""
        if not isinstance(w, AdaptedLinear):
            return w, None
        slots = self._banks.slots
        return w.weight, None if slots is None else self._ops.lora(x, w.bank, slots)

    def linear(self, x: Tensor, w: Any) -> Tensor:
        weight, addend = self._split(x, w)
        return self._ops.linear(x, weight, addend)

    def hidden(self, x: Tensor, up: Any, act: str, gated: bool) -> Tensor:
        weight, addend = self._split(x, up)
        return self._ops.hidden(x, weight, act, gated, addend)

    def logits(
        self, x: Tensor, head: Any, scale: float = 1.0, softcap: float | None = None
    ) -> Tensor:
        weight, addend = self._split(x, head)
        return self._ops.logits(x, weight, scale, softcap, addend)

    def embed_packed(self, ids: Tensor, w: Any, scale: float = 1.0) -> Tensor:
        """The table may also be one of its own (`embed`)."""
        table = w.weight if isinstance(w, AdaptedLinear) else w
        look_up = self._ops.embed if isinstance(table, Tensor) else self._ops.embed_packed
        x: Tensor = look_up(ids, table, scale)
        slots = self._banks.slots
        if slots is None or not isinstance(w, AdaptedLinear):
            return x
        return self._ops.lora_embed(x, ids, w.bank, slots, scale)

    def moe(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Any, args: MoeArgs
    ) -> Tensor:
        adapters, slots = None, self._banks.slots
        if isinstance(experts, AdaptedExperts):
            if slots is not None:
                adapters = ExpertAdapters(experts.up, experts.down, experts.experts, slots)
            experts = experts.weights
        return self._ops.moe(x, chosen, weights, experts, args, adapters)


def adapted(ops: Ops, banks: AdapterBanks) -> Ops:
    """`ops` that take adapted weights, too."""
    own = _Products(ops, banks)
    return ops.replace(
        linear=own.linear,
        hidden=own.hidden,
        logits=own.logits,
        embed_packed=own.embed_packed,
        moe=own.moe,
    )
