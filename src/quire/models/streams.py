"""The frame of a decoder with several residual streams: a layer that predicts and corrects them,
and the ways in and out (ops/mixers/streams.py).

Factors that stand before an RMS norm are part of its epsilon, see `Maker.norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.models.layers import SubLayer
from quire.models.maker import Maker
from quire.models.spec import Decoder, HyperStreams, Norm, Streams
from quire.ops import Batch, LinearWeight, NormWeight, Ops
from quire.ops.mixers.streams import HyperWeights

_HALF = 1 / math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class StreamRouter:
    """Router of streams, on which the matrices of a layer depend: n numbers of a token."""

    ops: Ops
    norm: NormWeight
    project: LinearWeight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, C] -> [T, n]."""
        return self.ops.linear(self.ops.norm(x, self.norm), self.project)


@dataclass(frozen=True, slots=True)
class LowRankProjection:
    """h + norm(right(left(h)))."""

    ops: Ops
    left: LinearWeight
    right: LinearWeight
    norm: NormWeight

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops = self.ops
        return ops.add(h, ops.norm(ops.linear(ops.linear(h, self.left), self.right), self.norm))


@dataclass(frozen=True, slots=True)
class NormedPart:
    """post(part(pre(x)))."""

    ops: Ops
    pre: NormWeight | None
    part: SubLayer
    post: NormWeight

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, C] -> [T, C]."""
        h = x if self.pre is None else self.ops.norm(x, self.pre)
        return self.ops.norm(self.part(h, batch), self.post)


@dataclass(frozen=True, slots=True)
class StreamsLayer:
    """One block over n streams. `mix` and `mixer_norm` are of the active stream; `leave` follows
    the layer. predict [n*n, n] and correct [n, n]; scale [C].
    """

    ops: Ops
    streams: Streams
    router: StreamRouter
    predict: Tensor
    correct: Tensor
    scale: Tensor
    mixer_norm: NormWeight
    mix: NormedPart
    low_rank: LowRankProjection
    feed: NormedPart
    inputs: NormedPart
    leave: Callable[[Tensor], Tensor]

    def enter(self, x: Tensor) -> Tensor:
        """Give x [T, n*C] as it is: what a layer reads is predicted in it."""
        return x

    def __call__(self, x: Tensor, h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x [T, n*C] -> the same after the layer, and what `leave` makes of it."""
        ops, router = self.ops, self.router
        x = ops.predict_streams(x, router(self._active(x)), self.predict)
        activated = self._run(self._active(x), batch)
        active = self.streams.active
        x = ops.correct_streams(x, activated, router(activated), self.correct, active)
        corrected = ops.multiply(self._active(x), self.scale)
        x = ops.add_to_streams(x, self.inputs(corrected, batch))
        return x, self.leave(x)

    def _run(self, x: Tensor, batch: Batch) -> Tensor:
        """Mixer and feed-forward part, [T, C] -> [T, C]."""
        ops = self.ops
        h = ops.norm(x, self.mixer_norm)
        total = ops.add(ops.add(x, self.mix(h, batch)), self.low_rank(h))
        return ops.add(self.feed(total, batch), total, _HALF)

    def _active(self, x: Tensor) -> Tensor:
        width = x.shape[1] // self.streams.count
        return x.narrow(1, self.streams.active * width, width)


def make_entry(make: Maker, s: Streams) -> Callable[[Tensor], Tensor]:
    """Build the function from embeddings [T, C] to streams [T, n*C]."""
    ops = make.ops
    project = make.linear("streams.enter", *(f"streams.enter.{i}" for i in range(1, s.count)))
    return lambda x: ops.enter_streams(x, ops.linear(x, project))


def make_exit(make: Maker, d: Decoder, s: Streams) -> Callable[[Tensor], Tensor]:
    """Build the function from streams [T, n*C] to the normed mean projected back, [T, C]."""
    ops, dim = make.ops, d.dim
    sides = [f"streams.leave.{i}" for i in range(1, s.count)]
    projections = [make.linear(side, side) for side in sides]
    assert d.final_norm is not None, "streams are left through a norm"
    norm = make.norm("norm", d.final_norm, divisor=s.count)

    def leave(x: Tensor) -> Tensor:
        first = total = x.narrow(1, 0, dim)
        for i, project in enumerate(projections, start=1):
            total = ops.add_matched(total, ops.linear(x.narrow(1, i * dim, dim), project), first)
        return ops.norm(total, norm)

    return leave


def _router(make: Maker, at: str, norm: Norm) -> StreamRouter:
    """Build the router of a layer whose leaves' names begin with `at`."""
    weight = make.norm(at + "norm", norm)
    return StreamRouter(make.ops, weight, make.linear(at + "router", at + "router", role="router"))


def make_streams_layer(
    make: Maker,
    at: str,
    s: Streams,
    norm: Norm,
    parts: tuple[NormedPart, NormedPart, NormedPart],
    leave: Callable[[Tensor], Tensor],
) -> StreamsLayer:
    """Build a layer of mixer, feed-forward part and input's part, of leaves below `at`."""
    mix, feed, inputs = parts
    assert mix.pre is not None and feed.pre is not None, "norms before the parts"
    low_rank = _low_rank(make, at + "low_rank.", norm)
    router = _router(make, at + "streams.", norm)
    return StreamsLayer(
        make.ops,
        s,
        router,
        predict=make.tensor(at + "streams.predict.weight"),
        correct=make.tensor(at + "streams.correct.weight"),
        scale=make.tensor(at + "streams.scale"),
        mixer_norm=mix.pre,
        mix=replace(mix, pre=None),
        low_rank=low_rank,
        # the sum that it reads is not divided by sqrt(2) yet
        feed=replace(feed, pre=replace(feed.pre, eps=2.0 * feed.pre.eps)),
        inputs=inputs,
        leave=leave,
    )


def _low_rank(make: Maker, at: str, norm: Norm) -> LowRankProjection:
    """Build the low-rank part of a layer whose leaves' names begin with `at`."""
    left, right = (make.linear(at + side, at + side) for side in ("left", "right"))
    return LowRankProjection(make.ops, left, right, make.norm(at + "norm", norm))


@dataclass(frozen=True, slots=True)
class HyperPart:
    """A part of a layer over n streams: what their sum is weighed by, and its norm."""

    weights: HyperWeights
    pre: NormWeight
    part: SubLayer


@dataclass(frozen=True, slots=True)
class HyperLayer:
    """One block over n streams of hyper-connections. `leave` follows the layer."""

    ops: Ops
    count: int
    parts: tuple[HyperPart, ...]
    leave: Callable[[Tensor], Tensor]

    def enter(self, x: Tensor) -> Tensor:
        """Give x [T, n*C] as it is: what a part reads is a sum of it."""
        return x

    def __call__(self, x: Tensor, h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x [T, n*C] -> the same after the layer, and what `leave` makes of it."""
        ops = self.ops
        for each in self.parts:
            total, mix = ops.collapse_streams(x, each.weights, self.count)
            x = ops.expand_streams(x, each.part(ops.norm(total, each.pre), batch), mix)
        return x, self.leave(x)


def make_hyper_entry(make: Maker, s: HyperStreams) -> Callable[[Tensor], Tensor]:
    """Build the function from embeddings [T, C] to equal streams [T, n*C]."""
    ops = make.ops

    def enter(x: Tensor) -> Tensor:
        streams = x
        for _ in range(1, s.count):
            streams = ops.join_streams(streams, x)
        return streams

    return enter


def make_hyper_exit(make: Maker, d: Decoder, s: HyperStreams) -> Callable[[Tensor], Tensor]:
    """Build the function from streams [T, n*C] to the normed sum [T, C]."""
    ops, weights = make.ops, _hyper_weights(make, "streams.leave.", s, (s.count,))
    assert d.final_norm is not None, "streams are left through a norm"
    norm = make.norm("norm", d.final_norm)
    return lambda x: ops.norm(ops.collapse_streams(x, weights, s.count)[0], norm)


def make_hyper_layer(
    make: Maker,
    at: str,
    s: HyperStreams,
    parts: Sequence[tuple[str, NormWeight, SubLayer]],
    leave: Callable[[Tensor], Tensor],
) -> HyperLayer:
    """Build a layer of parts with name and norm, whose other leaves are below `at`."""
    sizes = (s.count, s.count, s.count**2)
    built = [
        HyperPart(_hyper_weights(make, f"{at}streams.{name}.", s, sizes), pre, part)
        for name, pre, part in parts
    ]
    return HyperLayer(make.ops, s.count, tuple(built), leave)


def _hyper_weights(make: Maker, at: str, s: HyperStreams, sizes: Sequence[int]) -> HyperWeights:
    """`sizes`: for how many numbers each factor is."""
    counts = torch.tensor(sizes)
    return HyperWeights(
        weight=make.tensor(at + "weight", torch.float32),
        base=make.tensor(at + "base", torch.float32),
        scale=make.tensor(
            at + "scale", torch.float32, lambda x: x.repeat_interleave(counts.to(x.device))
        ),
        norm_eps=s.norm_eps,
        eps=s.eps,
        rounds=s.rounds,
    )
