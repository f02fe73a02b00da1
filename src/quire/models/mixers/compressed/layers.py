"""Attention to the last tokens and to compressed entries as a part of a decoder that runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.mixers.compressed.spec import CompressedAttention, Compression
from quire.models.spec import Norm
from quire.ops import (
    Batch,
    GroupBatch,
    HeadsWeight,
    LayerLatents,
    LinearWeight,
    NormWeight,
    Ops,
    RotaryTable,
)
from quire.ops.mixers.compressed import Compressor


@dataclass(frozen=True, slots=True)
class EntryChoice:
    """Chooses entries: `heads` queries of `dim` numbers, and what makes the keys of entries."""

    queries: LinearWeight
    by: Compressor
    heads: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class EntryMemory:
    """The maker of entries, and the place of their memory among those of the pool."""

    by: Compressor
    place: int
    choice: EntryChoice | None


@dataclass(frozen=True, slots=True)
class CompressedAttentionLayer:
    """Project, norm, store, choose entries, attend, project by groups of heads, and project.

    `down` makes the latent of queries, then a token's row with what entries are made of, then the
    weights of the choice.
    """

    ops: Ops
    spec: CompressedAttention
    down: LinearWeight
    q_a_norm: NormWeight
    row_norm: NormWeight
    q_b: LinearWeight
    q_norm: NormWeight
    sinks: Tensor
    groups: HeadsWeight
    out: Projection
    rotary: RotaryTable
    place: int
    entries: EntryMemory | None

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's rows and entries."""
        ops, a, positions = self.ops, self.spec, batch.positions
        both = ops.linear(h, self.down)
        latent = ops.norm(both[:, : a.q_rank], self.q_a_norm)
        group, recent = _memory(batch, self.place)
        end = a.q_rank + recent.width
        # for the norm alone: the rotation follows in `recent_store`, with that of the rows
        q = ops.rope_queries(
            ops.linear(latent, self.q_b),
            positions,
            heads=a.heads,
            head_dim=a.head_dim,
            rotary=None,
            q_norm=self.q_norm,
        )
        first = a.q_rank + a.head_dim
        q = ops.recent_store(
            q,
            ops.norm(both[:, a.q_rank : first], self.row_norm),
            both[:, first:end],
            recent,
            group.slots,
            positions,
            rotary=self.rotary,
        )
        y = ops.recent_attend(
            q,
            self.sinks,
            recent,
            group.plan,
            positions,
            rotary=self.rotary,
            window=a.window,
            scale=a.head_dim**-0.5,
            **self._entries(latent, both[:, end:], batch),
        )
        y = ops.heads_linear(y.flatten(1).unflatten(1, (a.groups, -1)), self.groups)
        return self.out(y.flatten(1))

    def _entries(self, latent: Tensor, weights: Tensor, batch: Batch) -> dict[str, object]:
        """Entries that the attention reads, which are chosen where there is a choice."""
        if self.entries is None:
            return {}
        choice, chosen = self.entries.choice, None
        far, entries = _memory(batch, self.entries.place)
        if choice is not None:
            near, recent = _memory(batch, self.place)
            chosen = self.ops.entry_select(
                self.ops.linear(latent, choice.queries).unflatten(1, (choice.heads, choice.dim)),
                weights,
                recent,
                near.plan,
                entries,
                far.slots,
                far.plan,
                batch.positions,
                choice.by,
                choice.top_k,
            )
        return {
            "latents": entries,
            "slots": far.slots,
            "entry_plan": far.plan,
            "by": self.entries.by,
            "chosen": chosen,
        }


def _memory(batch: Batch, place: int) -> tuple[GroupBatch, LayerLatents]:
    group, memory = batch.groups[batch.layer_groups[place]], batch.kv[place]
    assert isinstance(group, GroupBatch) and isinstance(memory, LayerLatents), "rows of numbers"
    return group, memory


def make_compressed_attention(
    make: Maker, at: str, a: CompressedAttention, place: int
) -> CompressedAttentionLayer:
    """Build the mixer of leaves below `at`, in order. Its memories begin at `place`."""
    rotary = make.rotary(a.rope)
    assert rotary is not None, "heads rotate"
    down = make.linear(at + "down", *(at + part for part, _ in a.products))
    q_a_norm = make.norm(at + "q_a_norm", norm_of(a))
    row_norm = make.norm(at + "row_norm", norm_of(a))
    q_b = make.linear(at + "q_b", at + "q_b")
    entries = None
    if a.compression is not None:
        entries = _entry_memory(make, at, a, a.compression, rotary, place + 1)
    sinks = make.tensor(at + "sinks", torch.float32)
    weight = make.weights.tensor(at + "o_a.weight")
    groups: HeadsWeight = make.ops.pack_heads(weight.view(a.groups, a.group_rank, -1))
    make.keep(at + "o_a", groups)
    return CompressedAttentionLayer(
        ops=make.ops,
        spec=a,
        down=down,
        q_a_norm=q_a_norm,
        row_norm=row_norm,
        q_b=q_b,
        q_norm=NormWeight("rms", a.eps, make.ones(a.head_dim)),
        sinks=sinks,
        groups=groups,
        out=make.row_linear(at + "o_b", a.groups),
        rotary=rotary,
        place=place,
        entries=entries,
    )


def norm_of(a: CompressedAttention) -> Norm:
    """The norm of latents, rows and entries."""
    return Norm("rms_late_cast", a.eps)


def _entry_memory(
    make: Maker, at: str, a: CompressedAttention, c: Compression, rotary: RotaryTable, place: int
) -> EntryMemory:
    def compressor(part: str, first: int) -> Compressor:
        bias = make.tensor(f"{at}{part}.bias", torch.float32)
        norm = make.norm(f"{at}{part}.norm", norm_of(a))
        return Compressor(first, c.rate, c.overlaps, bias, norm, rotary)

    by, choice = compressor("entry", a.head_dim), None
    if c.indexer is not None:
        first = a.head_dim + 2 * c.parts * a.head_dim
        queries = make.linear(at + "index.q", at + "index.q")
        choice = EntryChoice(
            queries, compressor("index", first), c.indexer.heads, c.indexer.dim, c.indexer.top_k
        )
    return EntryMemory(by, place, choice)
