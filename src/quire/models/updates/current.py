"""The values that a model has now, by the names of its checkpoint: patches change a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from quire.errors import WeightMismatch, WeightUpdateError
from quire.models.loading.model_parts import Part, tensors_of, tensors_within
from quire.models.parameters import Parameter
from quire.models.updates.plan import PieceFacts, UpdatePlan

_WHY_NOT = (
    "Patches change weights that are kept as the checkpoint has them, on one worker: send whole "
    "tensors by another backend."
)


def current_tensors(
    plan: UpdatePlan, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors of each layer, and of what comes before and after the layers, that has
    one of these names, under which it is then: together they are an update that changes nothing.

    Raises WeightMismatch at once for a name or a shape that is not one of the model's;
    WeightUpdateError, at once or later, where weights are kept in another form than the
    checkpoint's.
    """
    if plan.cut:
        raise WeightUpdateError(f"Several workers have parts of the weights. {_WHY_NOT}")
    name_of: dict[str, str] = {}
    for name, shape in shapes.items():
        if (found := plan.names.find(name)) is None:
            continue
        stored = found.stored
        if stored.name in name_of:
            raise WeightMismatch(f"{name} and {name_of[stored.name]} are one weight.")
        if stored.shape != shape:
            raise WeightMismatch(
                f"{name} has the shape {list(shape)} instead of {list(stored.shape)}."
            )
        name_of[stored.name] = name
    old = dict(plan.model.named_parts())
    return (
        {name_of.get(name, name): each for name, each in _of_piece(plan, piece, old).items()}
        for piece in plan.pieces
        if any(stored.name in name_of for stored in piece.stored)
    )


def _of_piece(plan: UpdatePlan, piece: PieceFacts, old: Mapping[str, Part]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, (_, leaves) in _made(plan, piece, lambda leaf: _zeros(plan, leaf)).items():
        values |= _rows_of(name, old[name], leaves)
    found = {}
    for stored in piece.stored:
        leaf = stored.sole_leaf
        if leaf is None or leaf.name not in values:
            raise WeightUpdateError(f"{stored.name} is kept in another form. {_WHY_NOT}")
        found[stored.name] = values[leaf.name].reshape(stored.shape)
    # rows may have been moved, or changed: what is made of these has to be what is there
    for name, (part, _) in _made(plan, piece, lambda leaf: values[leaf.name]).items():
        if not _are_equal(part, old[name]):
            raise WeightUpdateError(f"{name} is kept in another form. {_WHY_NOT}")
    return found


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
