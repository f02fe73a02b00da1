"""The transformer blocks of a vision encoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.feed_forward.dense import make_dense
from quire.models.layers import FeedForward
from quire.models.maker import Maker
from quire.models.mixers.prompt_attention import (
    ChangeOfHeads,
    PromptAttentionLayer,
    make_prompt_attention,
)
from quire.models.spec import Attention, Block, Mlp
from quire.ops import NormWeight, Ops, PromptBatch

Finish = Callable[[Tensor], Tensor]
"""The result of a part [T, C] -> what is added to the residual stream."""


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """x += finish(part(norm(x))): attention within frames or windows, and the feed-forward part."""

    ops: Ops
    attention: PromptAttentionLayer
    feed: FeedForward
    norms: tuple[NormWeight, NormWeight]
    finishes: tuple[Finish, Finish]

    def __call__(self, x: Tensor, positions: Tensor, group: PromptBatch) -> Tensor:
        """x [T, C] -> [T, C]; positions [1, T] are entries of the group's rotations."""
        ops, (before, between) = self.ops, self.norms
        mixed = self.attention(ops.norm(x, before), positions, group, None)
        x, h = ops.add_norm(x, self.finishes[0](mixed), between)
        return ops.add(x, self.finishes[1](self.feed(h)))


def make_block(
    make: Maker, at: str, b: Block, *, is_scaled: bool, turn: ChangeOfHeads | None = None
) -> VisionBlock:
    """Build the block whose leaves' names begin with `at`, in their order; `is_scaled`: see
    `VisionTower.layer_scale`; `turn`: that of `make_prompt_attention`.
    """
    assert isinstance(b.mixer, Attention) and isinstance(b.mlp, Mlp), "attention and a dense part"
    assert b.pre and b.parallel == "no" and not b.norms_sum, "norms come first"
    attn_pre = make.norm(at + "attn_pre", b.norm)
    attention = make_prompt_attention(make, at + "attn.", b.mixer, turn=turn)
    attn_post = make.norm(at + "attn_post", b.norm) if b.post else None
    mlp_pre = make.norm(at + "mlp_pre", b.norm)
    feed = make_dense(make, at + "mlp.", b.mlp)
    mlp_post = make.norm(at + "mlp_post", b.norm) if b.post else None
    scales = [make.tensor(f"{at}{part}_scale") for part in ("attn", "mlp")] if is_scaled else []
    first, second = scales or (None, None)
    return VisionBlock(
        make.ops,
        attention,
        feed,
        (attn_pre, mlp_pre),
        (_finish(make.ops, attn_post, first), _finish(make.ops, mlp_post, second)),
    )


def _finish(ops: Ops, post: NormWeight | None, scale: torch.Tensor | None) -> Finish:
    if post is not None:
        assert scale is None, "a norm or a scale"
        return lambda x: ops.norm(x, post)
    return (lambda x: x) if scale is None else (lambda x: ops.multiply(x, scale))
