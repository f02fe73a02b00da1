"""Operations and their implementations.

An `Op` is a record: its plain-torch body is the definition, and with it come the axes of its
tokens, the format that its opaque arguments share with other ops, and what it writes to. An
`Implementation` is a provider's faster body for one op. Neither file nor process keeps a table that
can change: the ops are listed in `catalog.py`, and the implementations come from the provider's
module, which `select.py` imports by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""The type that reductions run in, per activation type; float64 is for references in tests."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts by which a provider decides whether it serves a model, and what its ops run on.

    `runtime` belongs to the provider (`quire.kernels.cpu.runtime`); None lets it make its own.
    is_deterministic: a row's bits must not depend on the batch, at the price of speed where a
    provider is faster without that.
    """

    device: torch.device
    dtype: torch.dtype
    runtime: object | None = None
    is_deterministic: bool = False


Supports = Callable[[Facts], "bool | str"]
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Op(Generic[R_co]):
    """One operation: name, definition, and the facts that selection, recording and tests need.

    `axes` names the arguments that have an entry per token, and which of their axes that is; ops
    without any are not part of a recorded forward pass. `format` names the opaque objects (packed
    weights, KV layout) that the op shares with others: all ops of one format come from one
    provider. `mutates` names the arguments whose contents change; everything else is only read.
    `is_invariant`: the definition computes a row from that row alone, with the same arithmetic
    whatever the batch. `binds` names the parameters that `select` fills in from `Facts`, so that
    callers do not pass them. `only_for` names what a model must have for the op to be called; ""
    for all models.
    """

    name: str
    definition: Callable[..., R_co]
    axes: Mapping[str, int]
    mutates: tuple[str, ...]
    format: str | None
    binds: tuple[str, ...]
    is_invariant: bool
    only_for: str

    @property
    def signature(self) -> inspect.Signature:
        """The definition's parameters; every implementation takes the same."""
        return inspect.signature(self.definition)

    @property
    def group(self) -> str:
        """The unit of selection: the format where there is one, else the op itself."""
        return self.format or self.name

    # providers have types of their own for what a format hides, so that arguments are not typed
    def __get__(self, ops: object, owner: type) -> Callable[..., R_co]:
        """As an attribute of `Ops`: what the function that was chosen for it returns."""
        return self.definition

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        return self.definition(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Implementation:
    """A provider's body for one op.

    `supports` answers True, or the reason for refusing as a short sentence. `batch_invariant`
    claims that a row's bits do not depend on the other rows of the step. `takes_rows`: what packs
    weights takes them as `RowStack`s, too.
    """

    op: str
    provider: str
    function: Callable[..., Any]
    supports: Supports
    batch_invariant: bool = False
    takes_rows: bool = False


def op(
    *,
    axes: Mapping[str, int] = MappingProxyType({}),
    mutates: tuple[str, ...] = (),
    format: str | None = None,
    binds: tuple[str, ...] = (),
    is_invariant: bool = False,
    only_for: str = "",
) -> Callable[[Callable[..., R_co]], Op[R_co]]:
    """Make the decorated plain-torch body the definition of an op of the same name."""

    def wrap(definition: Callable[..., R_co]) -> Op[R_co]:
        name = definition.__name__
        record = Op(name, definition, axes, mutates, format, binds, is_invariant, only_for)
        unknown = {*axes, *mutates, *binds} - set(record.signature.parameters)
        assert not unknown, f"{name} has no parameter {sorted(unknown)}"
        return record

    return wrap
