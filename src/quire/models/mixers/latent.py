"""Multi-head latent attention as a part of a decoder that runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.spec import LatentAttention
from quire.ops import (
    GroupBatch,
    HeadsWeight,
    LayerLatents,
    LinearWeight,
    NormWeight,
    Ops,
    RotaryTable,
)


@dataclass(frozen=True, slots=True)
class QueryLatent:
    """Queries from a latent of their own: its norm, and the product that makes all heads of it."""

    norm: NormWeight
    up: LinearWeight


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    """Attention over latents: project, store, take the heads' key weights into the queries, attend,
    make the heads' values of the means, project.

    `down` makes the queries or their latent, and then the stored latent and its rotated key.
    """

    ops: Ops
    down: LinearWeight
    query: QueryLatent | None
    norm: NormWeight
    absorb: HeadsWeight
    values: HeadsWeight
    out: Projection
    heads: int
    unrotated: int
    rotary: RotaryTable | None
    scale: float

    def __call__(
        self, h: Tensor, positions: Tensor, group: GroupBatch, latents: LayerLatents
    ) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's latents into `latents`."""
        ops = self.ops
        both = ops.linear(h, self.down)
        width = both.shape[1] - latents.width
        q, x = both[:, :width], both[:, width:]
        if self.query is not None:
            q = ops.linear(ops.norm(q, self.query.norm), self.query.up)
        q = q.unflatten(1, (self.heads, -1))
        plain, turned = q[..., : self.unrotated], q[..., self.unrotated :]
        turned = ops.latent_store(
            turned, x, latents, group.slots, positions, norm=self.norm, rotary=self.rotary
        )
        means = ops.latent_attend(
            ops.heads_linear(plain, self.absorb), turned, latents, group.plan, self.scale
        )
        return self.out(ops.heads_linear(means, self.values).flatten(1))


def make_latent_attention(make: Maker, at: str, a: LatentAttention) -> LatentAttentionLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order."""
    first = "q" if a.q_rank is None else "q_a"
    down = make.linear(at + "q_kv_a", at + first, at + "kv_a")
    query = None
    if a.q_rank is not None:
        norm, name = make.norm(at + "q_a_norm", a.norm), at + "q_b"
        query = QueryLatent(norm, make.linear(name, name))
    norm = make.norm(at + "kv_a_norm", a.norm)
    kv = make.weights.tensor(at + "kv_b.weight")
    kv = kv.view(a.heads, a.unrotated + a.value_dim, a.rank)
    return LatentAttentionLayer(
        ops=make.ops,
        down=down,
        query=query,
        norm=norm,
        absorb=_heads(make, at + "absorb", kv[:, : a.unrotated].transpose(1, 2)),
        values=_heads(make, at + "values", kv[:, a.unrotated :]),
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        unrotated=a.unrotated,
        rotary=make.rotary(a.rope),
        scale=a.scale,
    )


def _heads(make: Maker, name: str, weight: Tensor) -> HeadsWeight:
    """A weight [H, out, in], kept in the model's dtype under every recipe."""
    packed: HeadsWeight = make.ops.pack_heads(weight)
    make.keep(name, packed)
    return packed
