"""Attention of transformers' models over the paged KV cache.

transformers looks up the attention function of a model by name and passes keyword arguments of the
model's call through to it. Our function hands every call to the `step` among them, so that no state
is global: to a `PagedStep` when the model runs, to the recorder of `dry_run.py` before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.models.foreign.spec import ForeignAttention
from quire.ops import AttentionArgs, Batch, GroupBatch, Ops

ATTENTION = "quire"
"""The name of our attention in transformers. It has no mask function, so no masks are made."""
STEP = "quire_step"
"""The keyword argument by which a step reaches the layers."""


class AttentionCalls(Protocol):
    """Answers the attention calls of a model's layers, in one pass."""

    def attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, facts: Mapping[str, Any]
    ) -> Tensor:
        """Attention of q [1, H, T, D] over k [1, K, T, D], v [1, K, T, Dv] -> [1, T, H, Dv]."""
        ...


class PagedStep:
    """One pass over a batch: `calls` in their order, each with a memory of its own."""

    def __init__(self, ops: Ops, batch: Batch, calls: Sequence[ForeignAttention]) -> None:
        self._ops, self._batch = ops, batch
        self._calls = iter(enumerate(calls))

    def attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, facts: Mapping[str, Any]
    ) -> Tensor:
        """Store the new keys and values, then attend to all that the rows' blocks hold."""
        batch = self._batch
        place, call = next(self._calls)
        assert layer.layer_idx == call.layer, "layers call attention in the order of the dry run"
        kv = batch.kv[place]
        group = batch.groups[batch.layer_groups[place]]
        assert isinstance(group, GroupBatch), "keys and values"
        if call.value_dim < call.head_dim:
            # memory has one width for keys and values
            v = F.pad(v, (0, call.head_dim - call.value_dim))
        qkv = torch.cat((q, k, v), 1)[0].transpose(0, 1).reshape(batch.num_tokens, -1)
        # transformers has rotated queries and keys: what is left is to store them
        queries = self._ops.rope_store(
            qkv,
            kv,
            group.slots,
            batch.positions,
            heads=call.heads,
            kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            rotary=None,
            qk_norm=None,
            clip=None,
        )
        args = AttentionArgs(call.scale, call.softcap, call.window, facts.get("s_aux"))
        attended: Tensor = self._ops.attend(queries, kv, group.plan, args)
        return attended.view(1, -1, call.heads, call.head_dim)[..., : call.value_dim]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **facts: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function of the name `ATTENTION`: see `AttentionCalls.attend`."""
    step: AttentionCalls | None = facts.pop(STEP, None)
    if step is None:
        raise TypeError(f"{type(module).__name__} is called without the model's keyword arguments")
    return step.attend(module, query, key, value, {**facts, "mask": attention_mask}), None
