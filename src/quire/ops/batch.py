"""The tensors of one step, which travel as one argument down the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.ops.attention import AttentionPlan
from quire.ops.kv import BlockMemory
from quire.ops.rotary import RotaryTable

PAD_SLOT = -1
"""The slot of a token whose keys and values are written nowhere."""

NO_BLOCK = -1
"""Stands for a block in `StateBatch` where nothing is read or written."""


@dataclass(slots=True)
class GroupBatch:
    """The fields in which KV groups differ: slots [T] int64, where the new K/V go, and the group's
    attention plan; `rotary`: this step's table in place of the layers' own, where positions have
    several axes.
    """

    slots: Tensor
    plan: AttentionPlan
    rotary: RotaryTable | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have an entry per token."""
        return (self.slots,)


@dataclass(slots=True)
class StateBatch:
    """A step's part of a KV group with recurrent state.

    reads [T] int64: at a row's first token the block that holds the state before it, NO_BLOCK at
    the tokens that follow, which continue from the token before. writes [T] int64: the block that
    gets the state after the token, or NO_BLOCK. No block that is written is read by the same step.
    """

    reads: Tensor
    writes: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have an entry per token."""
        return self.reads, self.writes


@dataclass(slots=True)
class PromptBatch:
    """A step's part of layers that keep nothing and see their prompt's own tokens: the prompts.

    rotary: the table of this step's positions, where rotations depend on more than a number for
    each token; layers have none of their own then.
    """

    plan: AttentionPlan
    rotary: RotaryTable | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have an entry per token: none."""
        return ()


LayerBatch = GroupBatch | StateBatch | PromptBatch
"""A layer's view of its KV group in a step."""


@dataclass(slots=True)
class Batch:
    """One step's input to a model, made by the runner and valid during that step.

    ids [T] int64; embeds [T, C] in the model's dtype where the embedding stage ran before, as in
    steps with media, in place of the ids' own; positions [P, T] int64; one entry of `groups` per KV
    group. Of every layer of the pool, which may have those of several models: `kv`, its memory
    (None: it has none), and `layer_groups`, its KV group. Tokens of a row are consecutive.

    token_types [T] int64 in models whose tokens have types.

    layer_inputs [T, L * P]: what the embedding stage makes for each layer, in models whose layers
    have inputs of their own; [T, C]: the embeddings, in those whose layers read them again.

    adapter_slots [T] int32: the slots of the tokens' adapters (ops/formats/lora.py); None: no token
    has an adapter.
    states [T, n*C]: hidden states that a draft network reads.
    deep: [T, C] each, added to the residual stream after the first layers, one after each, in steps
    with media of encoders whose rows have several parts (deepstack, Qwen3-VL).
    """

    ids: Tensor | None
    embeds: Tensor | None
    positions: Tensor
    groups: list[LayerBatch]
    kv: list[BlockMemory | None]
    layer_groups: Sequence[int]
    num_tokens: int
    layer_inputs: Tensor | None = None
    token_types: Tensor | None = None
    adapter_slots: Tensor | None = None
    states: Tensor | None = None
    deep: tuple[Tensor, ...] = ()
