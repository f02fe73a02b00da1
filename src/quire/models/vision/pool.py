"""The pooling of frames, in towers whose pictures have one vector each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.feed_forward.dense import make_dense
from quire.models.layers import FeedForward
from quire.models.maker import Maker
from quire.models.vision.spec import ProbePool
from quire.ops import LinearWeight, NormWeight, Ops

FramePool = Callable[[Sequence[Tensor]], Tensor]
"""The patches [n, C] of each frame -> a row for each [F, C]."""


@dataclass(frozen=True, slots=True)
class ProbeAttention:
    """Finds in a frame's patches what a learned vector asks for. A frame is computed by itself, so
    that its bits do not depend on the others.
    """

    ops: Ops
    heads: int
    query: Tensor
    keys: LinearWeight
    values: LinearWeight
    out: LinearWeight
    norm: NormWeight
    feed: FeedForward

    def __call__(self, frames: Sequence[Tensor]) -> Tensor:
        found = self.ops.linear(torch.cat([self._attend(x) for x in frames]), self.out)
        return self.ops.add(found, self.feed(self.ops.norm(found, self.norm)))

    def _attend(self, x: Tensor) -> Tensor:
        """Patches [n, C] -> [1, C]."""
        keys, values = self.ops.linear(x, self.keys), self.ops.linear(x, self.values)
        split = (len(x), self.heads, -1)
        query = self.query.view(self.heads, 1, -1).float()
        scores = query @ keys.view(split).float().permute(1, 2, 0)
        weights = (scores * query.shape[-1] ** -0.5).softmax(-1)
        mixed = weights @ values.view(split).float().transpose(0, 1)
        return mixed.reshape(1, -1).to(x.dtype)


def make_probe_attention(make: Maker, p: ProbePool) -> ProbeAttention:
    """Take the leaves, in load order."""
    probe = make.tensor("pool.probe")
    q, k, v, o = (make.linear(f"pool.{n}", f"pool.{n}", is_adaptable=False) for n in "qkvo")
    # the probe is learned, so its query is computed once
    query = make.ops.linear(probe.flatten(0, 1), q)
    norm = make.norm("pool.norm", p.norm)
    feed = make_dense(make, "pool.mlp.", p.mlp)
    return ProbeAttention(make.ops, p.heads, query, k, v, o, norm, feed)
