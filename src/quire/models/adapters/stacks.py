"""Adapters of parameters that hold all experts of a layer, as PEFT's `target_parameters` makes
them.

With E experts and rank r, A is [E r, in] with an expert's rows together, B [out, r E] with an
expert's columns E apart. Until version 0.20 of PEFT, "in" and "out" were the parameter's axes in
the order that its model has, right or wrong: then A's transpose serves as B and the other way
round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.errors import BadAdapter
from quire.models.adapters.contents import Pair
from quire.models.adapters.peft_config import PeftConfig
from quire.models.adapters.targets import AdapterTargets
from quire.models.rules import StoredTensor

_KNOWN_ORDER = (0, 20)
"""The version of PEFT from which on A has the inputs."""


@dataclass(frozen=True, slots=True)
class Stack:
    """An adapted parameter: `name` as it had in the model that was trained."""

    name: str
    pair: Pair
    stored: StoredTensor

    @property
    def experts(self) -> int:
        return self.stored.shape[0]

    @property
    def inputs(self) -> int:
        """The width of what an expert's matrix reads."""
        return self.stored.leaves[0].shape[1]

    @property
    def outputs(self) -> int:
        """The rows of an expert's matrix, of all leaves in it."""
        return sum(leaf.shape[0] for leaf in self.stored.leaves) // self.experts


def stacks_of(
    wrapped: Mapping[str, Sequence[Pair]], model: AdapterTargets, config: PeftConfig
) -> Iterator[Stack]:
    """The parameter that each pair adapts. Raises BadAdapter where that is not certain."""
    for module, pairs in wrapped.items():
        parameters = {_name_in(module, stored): stored for stored in model.stack(module)}
        if config.target_parameters:
            ends = tuple("." + end for end in config.target_parameters)
            parameters = {n: s for n, s in parameters.items() if ("." + n).endswith(ends)}
        if len(parameters) != len(pairs):
            raise BadAdapter(
                f"The adapter changes {len(pairs)} parameters of {module}, and target_parameters "
                f"names {len(parameters)} of those that can be changed."
            )
        for pair, (name, stored) in zip(pairs, parameters.items(), strict=True):
            yield Stack(name, pair, stored)


def _name_in(module: str, stored: StoredTensor) -> str:
    """The parameter's name, in the module as the adapter calls it."""
    return f"{module}.{stored.name.rpartition('.')[2]}"


def is_exchanged(
    stack: Stack, a: tuple[int, ...], b: tuple[int, ...], rank: int, config: PeftConfig
) -> bool:
    """Whether A has the outputs of a parameter and B the inputs, by their shapes. Raises BadAdapter
    for shapes that fit neither way, and where both would fit and the version does not tell.
    """
    inner = rank * stack.experts
    as_named = a == (inner, stack.inputs) and b == (stack.outputs, inner)
    exchanged = a == (inner, stack.outputs) and b == (stack.inputs, inner)
    if not as_named and not exchanged:
        raise BadAdapter(
            f"{stack.pair.a} and {stack.pair.b} are {list(a)} and {list(b)}, and rank {rank} of "
            f"{stack.name} needs {[inner, stack.inputs]} and {[stack.outputs, inner]}."
        )
    if as_named and exchanged and config.version < _KNOWN_ORDER:
        raise BadAdapter(
            f"{stack.name} is square, and versions of PEFT before 0.20 do not say which of its "
            "axes lora_A reads; load and save the adapter with a newer one."
        )
    return not as_named


def split_experts(a: Tensor, b: Tensor, experts: int, exchanged: bool) -> tuple[Tensor, Tensor]:
    """A [E r, in] and B [out, r E] of a stack -> a [E, r, in] and b [E, out, r]."""
    rows = a.unflatten(0, (experts, -1))
    columns = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return (columns.transpose(1, 2), rows.transpose(1, 2)) if exchanged else (rows, columns)
