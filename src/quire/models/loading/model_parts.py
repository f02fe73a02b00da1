"""The parts of a model that hold memory, and the tensors within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from quire.models.loading.separate_products import SeparateLinear
from quire.ops import ExpertWeights, HeadsWeight, LinearWeight
from quire.ops.linear import PlainLinear
from quire.ops.mixers.latent import PlainHeads
from quire.ops.moe import SeparateExperts

Part = Tensor | LinearWeight | HeadsWeight | ExpertWeights


class PartMemory(Protocol):
    """Memory of a model's parts. `leaves`: those of a part, without the ends of names."""

    def find(self, name: str) -> Part | None:
        """The part of this name where its values are not to be made of leaves; None: they are."""
        ...

    def tensor(self, name: str, leaves: Sequence[str]) -> Tensor | None:
        """The tensor of this name, which is to be filled; None: it stays as it is."""
        ...

    def packing(self, name: str, leaves: Sequence[str]) -> AbstractContextManager[None]:
        """A context in which this part is packed into its memory, unless it stays as it is."""
        ...


@runtime_checkable
class UnpackablePart(Protocol):
    """A part in a provider's own format."""

    def plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of its values in which nothing is packed, with the ends of their names."""
        ...


@runtime_checkable
class FillingPart(Protocol):
    """A part whose tensors threads may still be filling."""

    def wait(self) -> None:
        """Return when they are filled."""
        ...


def tensors_of(name: str, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a part as rows: its own, or copies where a provider has packed them. Of
    a format that cannot be unpacked they are those that it is kept in.
    """
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
    elif isinstance(part, SeparateLinear):
        for place, weight in enumerate(part.parts):
            yield from tensors_of(f"{name}.{place}", weight)
    elif isinstance(part, UnpackablePart):
        for end, tensor in part.plain_tensors():
            yield f"{name}.{end}", tensor
    else:
        for place, tensor in enumerate(tensors_within(part, with_addresses=False)):
            yield f"{name}.packed.{place}", tensor


def tensors_within(part: object, *, with_addresses: bool = True) -> Iterator[Tensor]:
    """Yield the tensors of a part, which may be in a provider's own format. with_addresses: also
    those that have no values, but places in memory. Without them all values are there when a tensor
    comes; else threads may still be filling it.
    """
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from tensors_within(item, with_addresses=with_addresses)
    elif is_dataclass(part) and not isinstance(part, type):
        if not with_addresses and isinstance(part, FillingPart):
            part.wait()
        for field in fields(part):
            if with_addresses or not field.metadata.get("addresses"):
                yield from tensors_within(getattr(part, field.name), with_addresses=with_addresses)
