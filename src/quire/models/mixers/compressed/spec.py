"""Attention to the last tokens and compressed entries before them (DeepSeek-V4). No torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.models.layer_memory import Latents
from quire.models.positions import Rope

KV_HEADS = 1
"""A token's row is key and value of all heads."""


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Chooses the `top_k` entries that a query attends to, by `heads` products of `dim` numbers
    with a key of each entry (`spec.Indexer`), which is made as entries are.
    """

    heads: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Compression:
    """An entry for every `rate` tokens: a sum of what each of them gives, weighed by gates. Where
    pieces `overlap`, the tokens of the piece before take part. `indexer`: queries attend to the
    entries that it chooses; None: to all.
    """

    rate: int
    overlaps: bool
    indexer: EntryIndexer | None = None

    @property
    def span(self) -> int:
        """The number of tokens that an entry is made of."""
        return self.rate * self.parts

    @property
    def parts(self) -> int:
        """Number of entries that a token takes part in."""
        return 1 + self.overlaps

    def numbers(self, head_dim: int) -> int:
        """Number of values of a token that entries and their keys are made of, gates included."""
        index = 0 if self.indexer is None else self.indexer.dim
        return 2 * self.parts * (head_dim + index)


@dataclass(frozen=True, slots=True)
class RecentTokens:
    """The part of the attention that sees the last `window` tokens; of the last `kept`, `numbers`
    for each are kept, its row of `head_dim` numbers among them.
    """

    heads: int
    head_dim: int
    window: int
    kept: int
    numbers: int

    @property
    def kv_heads(self) -> int:
        return KV_HEADS

    @property
    def memory(self) -> Latents:
        return Latents(self.numbers, 0, 0, window=self.kept)

    @property
    def widest(self) -> int:
        return self.heads * self.head_dim + self.numbers

    def flops(self, context: int) -> int:
        """Operations apart from those with weights, for a token that sees `context` tokens."""
        return 4 * self.heads * self.head_dim * min(context, self.window)


@dataclass(frozen=True, slots=True)
class Entries:
    """The part of the attention that sees entries of `head_dim` numbers."""

    heads: int
    head_dim: int
    compression: Compression

    @property
    def memory(self) -> Latents:
        """An entry for some tokens, with its key of the choice."""
        indexer = self.compression.indexer
        keys = 0 if indexer is None else indexer.dim
        return Latents(self.head_dim, 0, keys, every=self.compression.rate)

    @property
    def widest(self) -> int:
        return 0

    def flops(self, context: int) -> int:
        """Operations apart from those with weights, for a token that sees `context` tokens."""
        seen, indexer, scored = context // self.compression.rate, self.compression.indexer, 0
        if indexer is not None:
            scored = 2 * indexer.heads * indexer.dim * seen
            seen = min(seen, indexer.top_k)
        return 4 * self.heads * self.head_dim * seen + scored


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Causal softmax attention with H heads of D values over one row of each of the last `window`
    tokens, and with a `compression` over entries of all.

    Queries come from a normed latent of `q_rank` numbers, and each head of them is normed without a
    weight; rows are normed. `eps` is of all norms. The last values of heads rotate, and those of
    the attended values rotate back. Each head has a sink. The output is a product of each of
    `groups` of heads to `group_rank` numbers, and one of all of these.
    """

    heads: int
    head_dim: int
    window: int
    q_rank: int
    groups: int
    group_rank: int
    eps: float
    rope: Rope
    compression: Compression | None = None

    @property
    def products(self) -> tuple[tuple[str, int], ...]:
        """The projections of the input, in order, and how many numbers each makes."""
        found = [("q_a", self.q_rank), ("row", self.head_dim)]
        if (c := self.compression) is None:
            return tuple(found)
        found += [(f"entry.{part}", c.parts * self.head_dim) for part in ("numbers", "gates")]
        if c.indexer is not None:
            found += [(f"index.{part}", c.parts * c.indexer.dim) for part in ("numbers", "gates")]
            found.append(("index.weights", c.indexer.heads))
        return tuple(found)

    @property
    def mixers(self) -> tuple[RecentTokens | Entries, ...]:
        """The mixers in the order of their memories."""
        c, kept, numbers = self.compression, self.window, self.head_dim
        if c is not None:
            kept, numbers = max(kept, c.span), numbers + c.numbers(self.head_dim)
        recent = RecentTokens(self.heads, self.head_dim, self.window, kept, numbers)
        return (recent,) if c is None else (recent, Entries(self.heads, self.head_dim, c))
