"""Attention within whole prompts, as encoders have it, as a part of a decoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.mixers.relative_scores import make_relative_scores
from quire.models.parameters import projections_of
from quire.models.positions import DisentangledScores
from quire.models.spec import Attention
from quire.ops import LinearWeight, NormWeight, Ops, PromptBatch, RotaryTable


@dataclass(frozen=True, slots=True)
class PromptAttentionLayer:
    """Attention over the tokens of the same prompt: project, norm, rotate, attend, project.

    `norms_whole`: the norms of queries and keys are over all heads together. `v_norm`: of each
    head's values.
    """

    ops: Ops
    qkv: LinearWeight
    out: Projection
    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryTable | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    attend: Callable[..., Tensor]
    norms_whole: bool = False
    v_norm: NormWeight | None = None

    def __call__(self, h: Tensor, positions: Tensor, group: PromptBatch, kv: None) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, width = self.ops, self.kv_heads * self.head_dim
        qkv = ops.linear(h, self.qkv)
        q, k, v = qkv.split((self.heads * self.head_dim, width, width), 1)
        values = v.unflatten(1, (self.kv_heads, self.head_dim))
        if self.v_norm is not None:
            values = ops.norm(values, self.v_norm)
        rotary = self.rotary if group.rotary is None else group.rotary
        attended = self.attend(
            self._turned(q, positions, self.heads, self.q_norm, rotary),
            self._turned(k, positions, self.kv_heads, self.k_norm, rotary),
            values,
            group.plan,
        )
        return self.out(attended)

    def _turned(
        self,
        x: Tensor,
        positions: Tensor,
        heads: int,
        norm: NormWeight | None,
        rotary: RotaryTable | None,
    ) -> Tensor:
        """x [T, heads * D], normed and rotated -> [T, heads, D]."""
        if norm is not None and self.norms_whole:
            x, norm = self.ops.norm(x, norm), None
        if rotary is None and norm is None:
            return x.unflatten(1, (heads, self.head_dim))
        return self.ops.rope_queries(
            x, positions, heads=heads, head_dim=self.head_dim, rotary=rotary, q_norm=norm
        )


ChangeOfHeads = Callable[[Tensor, int], Tensor]
"""The rows of some heads, or the weight of one head's norm, in another order of a head's values."""


def make_prompt_attention(
    make: Maker,
    at: str,
    a: Attention,
    distances: Tensor | None = None,
    turn: ChangeOfHeads | None = None,
) -> PromptAttentionLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order; `distances` is the table
    of scores by distances that all layers share. `turn` changes queries and keys and their norms.
    """
    plain = Attention(a.heads, a.kv_heads, a.head_dim, a.scale)
    kinds = (a.chunk, a.softcap, a.sinks, a.temperature, a.clip, a.gate, a.value_dim)
    usual = (plain.chunk, plain.softcap, plain.sinks, plain.temperature, plain.clip)
    assert kinds == (*usual, plain.gate, plain.value_dim), "no other form"
    assert not (a.values_are_keys or a.shares is not None), "no other form"
    if a.qk_norm is not None:
        assert a.qk_norm_over != "per_head" and not a.qk_norm_after_rope, "norms first"
    # adapters of products that positions go through, too, would have to change their tables
    is_adaptable = not (isinstance(a.distances, DisentangledScores) and a.distances.shares_products)
    qkv = make.linear(
        at + "qkv",
        *(at + part for part in projections_of(a)),
        is_adaptable=is_adaptable,
        change=None if turn is None else partial(_turned_inputs, turn=turn, a=a),
    )
    norms = [
        None if a.qk_norm is None else make.norm(f"{at}{part}_norm", a.qk_norm) for part in "qk"
    ]
    if turn is not None:
        norms = [_turned_norm(norm, turn) for norm in norms]
    v_norm = None
    if a.value_norm:
        assert a.qk_norm is not None, "values are normed as keys are"
        v_norm = NormWeight("rms", a.qk_norm.eps, make.ones(a.head_dim))
    relative = make_relative_scores(make, at, a, qkv, distances)
    options = {"scale": a.scale, "window": a.window}
    attend = partial(make.ops.attend_prompts, **options)
    if relative is not None:
        attend = partial(make.ops.attend_relative, relative=relative, **options)
    return PromptAttentionLayer(
        ops=make.ops,
        qkv=qkv,
        q_norm=norms[0],
        k_norm=norms[1],
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        rotary=make.rotary(a.rope),
        attend=attend,
        norms_whole=a.qk_norm_over == "full",
        v_norm=v_norm,
    )


def _turned_inputs(rows: Tensor, turn: ChangeOfHeads, a: Attention) -> Tensor:
    width = a.head_dim
    q, k, v = rows.split((a.heads * width, a.kv_heads * width, a.kv_heads * width))
    return torch.cat((turn(q, a.heads), turn(k, a.kv_heads), v))


def _turned_norm(norm: NormWeight | None, turn: ChangeOfHeads) -> NormWeight | None:
    if norm is None or norm.weight is None:
        return norm
    return replace(norm, weight=turn(norm.weight, 1))
