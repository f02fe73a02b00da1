"""The parts of a model that hold memory, and the tensors within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Protocol

from torch import Tensor

from quire.ops import ExpertWeights, HeadsWeight, LinearWeight
from quire.ops.linear import PlainLinear
from quire.ops.mixers.latent import PlainHeads
from quire.ops.moe import SeparateExperts

Part = Tensor | LinearWeight | HeadsWeight | ExpertWeights


class PartMemory(Protocol):
    """Memory of the parts of a model that is there. `leaves` are those of a part, without the ends
    of their names.
    """

    def tensor(self, name: str, leaves: Sequence[str]) -> Tensor | None:
        """The tensor of this name, which is to be filled; None: it stays as it is."""
        ...

    def packing(self, name: str, leaves: Sequence[str]) -> AbstractContextManager[None]:
        """Where the part of this name is packed into its memory, unless it stays as it is."""
        ...


def tensors_of(name: str, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a part; none if a provider keeps it in its own format."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, PlainHeads):
        yield name + ".weight", part.weight
    elif isinstance(part, PlainLinear):
        yield name + ".weight", part.weight
        if part.bias is not None:
            yield name + ".bias", part.bias
    elif isinstance(part, SeparateExperts):
        for which, weights in (("up", part.up), ("down", part.down)):
            for expert, weight in enumerate(weights):
                yield from tensors_of(f"{name}.{expert}.{which}", weight)


def tensors_within(part: object, *, with_addresses: bool = True) -> Iterator[Tensor]:
    """Yield the tensors of a part, which may be in a provider's own format. with_addresses: also
    those that have no values, but places in memory.
    """
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from tensors_within(item, with_addresses=with_addresses)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            if with_addresses or not field.metadata.get("addresses"):
                yield from tensors_within(getattr(part, field.name), with_addresses=with_addresses)
