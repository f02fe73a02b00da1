"""Attention to chosen blocks of keys as a part of a decoder that runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.spec import BlockAttention
from quire.ops import GroupBatch, LayerLatents, LinearWeight, NormWeight, Ops, RotaryTable


@dataclass(frozen=True, slots=True)
class BlockAttentionLayer:
    """Project, normalise and rotate; choose blocks, attend to them, project. `inputs` makes queries
    and the key of the choice, with norms of their own.
    """

    ops: Ops
    qkv: LinearWeight
    q_norm: NormWeight
    k_norm: NormWeight
    inputs: LinearWeight
    index_q_norm: NormWeight
    index_k_norm: NormWeight
    out: Projection
    spec: BlockAttention
    rotary: RotaryTable | None

    def __call__(
        self, h: Tensor, positions: Tensor, group: GroupBatch, latents: LayerLatents
    ) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's keys and values into `latents`."""
        ops, a, index = self.ops, self.spec, self.spec.indexer
        turn = partial(ops.rope_queries, rotary=self.rotary)
        both, width = ops.linear(h, self.inputs), index.heads * index.dim
        of_choice = partial(turn, head_dim=index.dim)
        chosen = ops.block_select(
            of_choice(both[:, :width], positions, heads=index.heads, q_norm=self.index_q_norm),
            of_choice(both[:, width:], positions, heads=1, q_norm=self.index_k_norm)[:, 0],
            *(latents, group.slots, group.plan),
            size=index.size,
            top_k=index.top_k,
            local=index.local,
        )
        qkv = ops.linear(h, self.qkv)
        first, last = a.heads * a.head_dim, (a.heads + a.kv_heads) * a.head_dim
        attended = ops.block_attend(
            turn(qkv[:, :first], positions, heads=a.heads, head_dim=a.head_dim, q_norm=self.q_norm),
            turn(
                *(qkv[:, first:last], positions),
                heads=a.kv_heads,
                head_dim=a.head_dim,
                q_norm=self.k_norm,
            ),
            qkv[:, last:].unflatten(1, (a.kv_heads, a.head_dim)),
            *(chosen, latents, group.slots, group.plan),
            scale=a.scale,
            size=index.size,
        )
        return self.out(attended.flatten(1))


def make_block_attention(make: Maker, at: str, a: BlockAttention) -> BlockAttentionLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order."""
    index = at + "index."
    return BlockAttentionLayer(  # evaluated in this order, which is the order of the leaves
        ops=make.ops,
        qkv=make.linear(at + "qkv", *(at + part for part in "qkv")),
        q_norm=make.norm(at + "q_norm", a.norm),
        k_norm=make.norm(at + "k_norm", a.norm),
        inputs=make.linear(index + "inputs", index + "q", index + "k"),
        index_q_norm=make.norm(index + "q_norm", a.norm),
        index_k_norm=make.norm(index + "k_norm", a.norm),
        out=make.row_linear(at + "o", a.heads),
        spec=a,
        rotary=make.rotary(a.rope),
    )
