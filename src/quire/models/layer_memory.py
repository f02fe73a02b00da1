"""The memory that a layer keeps of a request, as declared by its mixer (`spec.py`).

The KV groups of a pool, the size of its blocks and how many of them a request needs are functions
of these values (`kv_pool.py`). Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

MemoryKind = Literal["full", "sliding", "source", "state", "none"]
"""Memory of a layer: every token, a window's, a second content, a state per request, nothing."""


@dataclass(frozen=True, slots=True)
class NumberBytes:
    """Bytes of one number: of the model's dtype, of keys and values, and of the scale that each key
    and each value of a head has (0: none).
    """

    activation: int
    kv: int
    kv_scale: int = 0


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Keys and values of K heads of D numbers, of every token (`full`), or of the last `window`
    tokens, the query's own included (`sliding`). is_chunked: of these, a query sees only those
    since the last position that is a multiple of `window`. source: in place of the tokens', those
    of a second content of at most so many rows, which do not grow. ignores_spans: see `Attention`.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    is_chunked: bool = False
    source: int | None = None
    ignores_spans: bool = False

    @property
    def kind(self) -> MemoryKind:
        """`full` without a window."""
        if self.source is not None:
            return "source"
        return "full" if self.window is None else "sliding"

    @property
    def numbers_per_token(self) -> int:
        """The number of values per token, keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    def num_seen(self, context: int) -> int:
        """Number of `context` tokens that are kept for the next query, or rows of the source."""
        if self.source is not None:
            return self.source
        return context if self.window is None else min(context, self.window)

    def token_bytes(self, number: NumberBytes) -> int:
        return self.numbers_per_token * number.kv + 2 * self.kv_heads * number.kv_scale

    def block_bytes(self, block_size: int, number: NumberBytes) -> int:
        return block_size * self.token_bytes(number)

    def step_bytes(self, context: int, number: NumberBytes) -> int:
        """The bytes that a new token after `context` tokens reads."""
        return self.num_seen(context) * self.token_bytes(number)


@dataclass(frozen=True, slots=True)
class Latents:
    """A latent of `rank` numbers and a rotated key of `rotated` numbers of every token, from which
    all heads make their keys and values (`spec.LatentAttention`), or as one latent the keys and
    values of all heads (`spec.BlockAttention`).

    `index_dim`: queries attend to chosen tokens only, and each token also has a key of so many
    numbers for the choice; 0 where another layer chooses, None where queries attend to all.
    `window`: of the last so many tokens, the query's own included; None: of all. `every`: there is
    one for so many tokens (`spec.CompressedAttention`).
    """

    rank: int
    rotated: int
    index_dim: int | None = None
    window: int | None = None
    every: int = 1

    @property
    def kind(self) -> MemoryKind:
        return "full" if self.window is None else "sliding"

    @property
    def numbers_per_row(self) -> int:
        """The number of values of one latent with what belongs to it."""
        return self.rank + self.rotated + (self.index_dim or 0)

    @property
    def numbers_per_token(self) -> int:
        """The number of values per token, whatever the number of heads."""
        return -(-self.numbers_per_row // self.every)

    @property
    def is_indexed(self) -> bool:
        """Whether queries attend to chosen tokens only."""
        return self.index_dim is not None

    def num_seen(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def token_bytes(self, number: NumberBytes) -> int:
        return self.numbers_per_token * number.kv

    def block_bytes(self, block_size: int, number: NumberBytes) -> int:
        return -(-block_size // self.every) * self.numbers_per_row * number.kv

    def step_bytes(self, context: int, number: NumberBytes) -> int:
        return self.num_seen(context) * self.token_bytes(number)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A state whose size does not depend on the request's length: `wide_numbers` in float32, then
    `numbers` in the model's dtype. has_kernels: they exist for GPUs; else the host walks from token
    to token.
    """

    numbers: int = 0
    wide_numbers: int = 0
    has_kernels: bool = True
    kind: ClassVar[MemoryKind] = "state"
    window: ClassVar[None] = None

    def block_bytes(self, block_size: int, number: NumberBytes) -> int:
        """The bytes of the state of one request, for any block size."""
        return self.numbers * number.activation + 4 * self.wide_numbers

    def step_bytes(self, context: int, number: NumberBytes) -> int:
        """The bytes that a new token reads and writes, whatever the context."""
        return 2 * self.block_bytes(1, number)


TokenMemory = KeyValues | Latents
"""Memory that grows with every token."""

LayerMemory = TokenMemory | RecurrentState
"""Memory of a layer; None: its mixer sees the step's own tokens and keeps nothing."""
