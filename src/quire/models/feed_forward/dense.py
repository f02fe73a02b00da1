"""Feed-forward parts that all tokens go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.models.layers import FeedForward, Projection
from quire.models.maker import Maker
from quire.models.parameters import XIELU_PARTS
from quire.models.spec import Mlp, Moe
from quire.ops import LinearWeight, Ops


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """A feed-forward part that all tokens go through."""

    ops: Ops
    up: LinearWeight
    down: Projection
    act: str
    gated: bool

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.down(self.ops.hidden(h, self.up, self.act, self.gated))


@dataclass(frozen=True, slots=True)
class ActivatedFeedForward:
    """A feed-forward part whose activation is an op of its own: [T, up's outputs] -> [T, inner]."""

    ops: Ops
    up: LinearWeight
    down: Projection
    activate: Callable[[Tensor], Tensor]

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.down(self.activate(self.ops.linear(h, self.up)))


@dataclass(frozen=True, slots=True)
class SparseOverWorkers:
    """An activation that looks at all workers' gates: each activates rows, and keeps its part."""

    group: WorkerGroup
    activate: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, 2F], gates and ups of this worker -> [T, F]."""
        return self.group.apply(self._part, (x,), x.shape[1] // 2)

    def _part(self, x: Tensor) -> Tensor:
        group = self.group
        # a worker's row is its gates and then its ups, so the halves of all workers are brought
        # together first: the cut is by a whole row's mean and deviation
        halves = group.gather(x).unflatten(2, (2, -1)).transpose(1, 2)
        return self.activate(halves.flatten(1)).unflatten(1, (group.size, -1))[:, group.rank]


def make_dense(make: Maker, at: str, m: Mlp) -> FeedForward:
    """Build the part whose leaves' names begin with `at`, in their order."""
    ops = make.ops
    is_one_op = m.bound is m.clamp is None and not m.sparsity and m.act != "xielu"
    leaves = [at + part for part in inputs_of(m)]
    up = make.linear(at + "up", *leaves, gated=m.gated and is_one_op)
    activate = None if is_one_op else _activation(make, at, m)
    down = make.row_linear(at + "down", m.width)
    if activate is None:
        return DenseFeedForward(ops, up, down, m.act, m.gated)
    return ActivatedFeedForward(ops, up, down, activate)


def _activation(make: Maker, at: str, m: Mlp) -> Callable[[Tensor], Tensor]:
    """The step after the first product where that is an op of its own."""
    ops = make.ops
    if m.clamp is not None:
        assert m.gated and m.act == "silu", "gates without another form"
        assert m.bound is None and not m.sparsity, "gates without another form"
        return partial(ops.clamped_gated, limit=m.clamp)
    if m.bound is not None:
        assert m.gated and not m.sparsity, "gates without another form"
        return partial(ops.bounded_gated, act=m.act, bound=m.bound)
    if m.sparsity:
        assert m.gated and m.sparsity < 1.0, "a share of gates"
        from statistics import NormalDist  # few models need it

        deviations = NormalDist().inv_cdf(m.sparsity)
        open_gates = partial(ops.sparse_gated, act=m.act, deviations=deviations)
        group = make.group_of(at + "down.weight")
        return open_gates if group is None else SparseOverWorkers(group, open_gates)
    numbers = make.merged(at + "xielu", [f"{at}xielu.{part}" for part in XIELU_PARTS])
    return partial(ops.xielu, numbers=numbers)


def inputs_of(m: Mlp | Moe) -> tuple[str, ...]:
    """The projections of a feed-forward part's input."""
    return ("gate", "up") if m.gated else ("up",)
