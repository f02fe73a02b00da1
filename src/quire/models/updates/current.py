"""The values that a model has now, by the names of its checkpoint, where it keeps them so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from quire.models.loading.model_parts import Part, tensors_of, tensors_within
from quire.models.parameters import Parameter
from quire.models.updates.plan import PieceFacts, UpdatePlan


def current_tensors(
    plan: UpdatePlan, piece: PieceFacts, old: Mapping[str, Part]
) -> dict[str, Tensor] | None:
    """Copies of the tensors of a piece, whose parts are among `old`: loading them changes nothing.
    None where weights are kept in another form than the checkpoint's, or in part.
    """
    if plan.cut:
        return None
    values: dict[str, Tensor] = {}
    for name, (_, leaves) in _made(plan, piece, lambda leaf: _zeros(plan, leaf)).items():
        values |= _rows_of(name, old[name], leaves)
    found = {}
    for stored in piece.stored:
        leaf = stored.sole_leaf
        if leaf is None or leaf.name not in values:
            return None
        found[stored.name] = values[leaf.name].reshape(stored.shape)
    # rows may have been moved, or changed: what is made of these has to be what is there
    made = _made(plan, piece, lambda leaf: values[leaf.name])
    is_same = all(_are_equal(part, old[name]) for name, (part, _) in made.items())
    return found if is_same else None


def _rows_of(name: str, part: Part, leaves: Sequence[Parameter]) -> dict[str, Tensor]:
    """The leaves that a part is made of, where it is their rows, one above the other."""
    found = {}
    for kept_as, tensor in tensors_of(name, part):
        end = "" if isinstance(part, Tensor) else kept_as.rpartition(".")[2]
        own = [each for each in leaves if each.name.endswith(end)]
        sizes = [each.shape[0] for each in own]
        if not tensor.is_floating_point() or sum(sizes) != len(tensor):
            continue
        for leaf, rows in zip(own, tensor.split(sizes), strict=True):
            if leaf.shape == tuple(rows.shape):
                found[leaf.name] = rows.clone()
    return found


def _zeros(plan: UpdatePlan, leaf: Parameter) -> Tensor:
    return torch.zeros((), dtype=plan.dtype).expand(leaf.shape)


def _are_equal(part: Part, other: Part) -> bool:
    pairs = zip_longest(*(tensors_within(p, with_addresses=False) for p in (part, other)))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def _made(
    plan: UpdatePlan, piece: PieceFacts, value: Callable[[Parameter], Tensor]
) -> dict[str, tuple[Part, list[Parameter]]]:
    """The parts of a model of these values, each with its leaves in the order of its rows."""
    found: dict[str, tuple[Part, list[Parameter]]] = {}
    leaves: list[Parameter] = []

    def read(leaf: Parameter) -> Tensor:
        leaves.append(leaf)
        return value(leaf)

    def note(name: str, part: Part) -> None:
        found[name] = part, leaves.copy()
        leaves.clear()

    plan.build(piece, read, note=note)
    return found
