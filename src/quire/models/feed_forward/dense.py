"""Feed-forward parts that all tokens go through."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

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
class XieluFeedForward:
    """A feed-forward part whose activation has learned numbers [4], see `ops.xielu`."""

    ops: Ops
    up: LinearWeight
    down: Projection
    numbers: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.down(self.ops.xielu(self.ops.linear(h, self.up), self.numbers))


@dataclass(frozen=True, slots=True)
class BoundedFeedForward:
    """A gated feed-forward part whose gates and inputs have a bound, see `ops.bounded_gated`."""

    ops: Ops
    up: LinearWeight
    down: Projection
    act: str
    bound: float

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops = self.ops
        return self.down(ops.bounded_gated(ops.linear(h, self.up), self.act, self.bound))


@dataclass(frozen=True, slots=True)
class SparseFeedForward:
    """A gated feed-forward part that cuts its gates at their mean plus so many standard deviations,
    see `ops.sparse_gated`.
    """

    ops: Ops
    up: LinearWeight
    down: Projection
    act: str
    deviations: float

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops = self.ops
        return self.down(ops.sparse_gated(ops.linear(h, self.up), self.act, self.deviations))


def make_dense(make: Maker, at: str, m: Mlp) -> FeedForward:
    """Build the part whose leaves' names begin with `at`, in their order."""
    up = make.linear(at + "up", *[at + part for part in inputs_of(m)])
    if m.bound is not None:
        assert m.gated and not m.sparsity, "gates without another form"
        down = make.row_linear(at + "down", m.width)
        return BoundedFeedForward(make.ops, up, down, m.act, m.bound)
    if m.sparsity:
        assert m.gated and m.sparsity < 1.0, "a share of gates"
        down, deviations = make.row_linear(at + "down", m.width), NormalDist().inv_cdf(m.sparsity)
        return SparseFeedForward(make.ops, up, down, m.act, deviations)
    if m.act != "xielu":
        return DenseFeedForward(make.ops, up, make.row_linear(at + "down", m.width), m.act, m.gated)
    numbers = make.merged(at + "xielu", [f"{at}xielu.{part}" for part in XIELU_PARTS])
    return XieluFeedForward(make.ops, up, make.row_linear(at + "down", m.width), numbers)


def inputs_of(m: Mlp | Moe) -> tuple[str, ...]:
    """The projections of a feed-forward part's input."""
    return ("gate", "up") if m.gated else ("up",)
