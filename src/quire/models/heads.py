"""Heads turn hidden states into a row's result. This release has the language-model head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.distributed.worker_group import ProductGroup, WorkerGroup
from quire.ops import LinearWeight, Ops
from quire.ops.linear import SharedOutputs


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The part of the vocabulary [V / size, C] that a worker of a group computes."""

    weight: LinearWeight
    group: WorkerGroup

    @classmethod
    def of(cls, weight: LinearWeight, group: WorkerGroup | None) -> HeadPart | None:
        """This worker's part of a head's weight; None where each worker computes all of it."""
        if group is None or not isinstance(weight, SharedOutputs):
            return None
        part = weight.share(group.rank, group.size)
        return None if part is None else cls(part, group)


@dataclass(frozen=True, slots=True)
class LanguageModelHead:
    """Scores over the vocabulary; `weight` is [V, C] packed, shared with the embedding where the
    spec ties them. `part`: of the worker of a group, in the same memory; None: there is none.
    """

    ops: Ops
    weight: LinearWeight
    scale: float
    softcap: float | None
    part: HeadPart | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C], after the final norm -> fp32 [R, V]."""
        return self.ops.logits(hidden, self.weight, self.scale, self.softcap)

    def shared_logits(self, hidden: Tensor) -> Tensor:
        """`logits`, a part from each worker of the group; all call it, the first gets them."""
        assert self.part is not None, "the workers have the whole head each"
        weight, group = self.part.weight, self.part.group
        compute = partial(self.ops.logits, hidden, weight, self.scale, self.softcap)
        whole = None
        if isinstance(group, ProductGroup):
            whole = group.outputs(compute, len(hidden), weight.out_features)
        if whole is None:
            whole = group.gather(compute(), to_first=True)
        return whole.flatten(1)
