"""Facts of a model that runs through transformers. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quire.models.layer_memory import KeyValues, Latents, LayerMemory, RecurrentState


@dataclass(frozen=True, slots=True)
class ForeignAttention:
    """A layer's call of attention as transformers makes it: H query heads over K key/value heads of
    D numbers, of which values have the first `value_dim`. `layer` is transformers' number of the
    layer; `window` and `softcap` are those of `spec.Attention`.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def memory(self) -> KeyValues:
        """Keys and values of the tokens that queries see."""
        return KeyValues(self.kv_heads, self.head_dim, self.window)


@dataclass(frozen=True, slots=True)
class ForeignCache:
    """The contents of transformers' own cache for each token in a layer: keys and values of K
    heads, `head_dim` and `value_dim` numbers each, and a key of `index_dim` numbers where tokens
    are chosen (0: none). The number of query heads is the model's own affair.
    """

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    index_dim: int = 0
    window: ClassVar[None] = None

    @property
    def numbers(self) -> int:
        """Keys and values of a token."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def memory(self) -> Latents:
        """Keys and values of all tokens in one row each, without a provider's layout."""
        return Latents(self.numbers, 0, self.index_dim)


@dataclass(frozen=True, slots=True)
class ForeignState:
    """The contents of transformers' own cache for a request in a layer, whatever its length: the
    shapes [1, ...] of convolutions' last inputs and of recurrent states, each with its number in
    the layer. They are kept in fp32.
    """

    layer: int
    convolved: tuple[tuple[int, tuple[int, ...]], ...]
    recurrent: tuple[tuple[int, tuple[int, ...]], ...]
    window: ClassVar[None] = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of each part, those of convolutions first."""
        return tuple(math.prod(shape) for _, shape in (*self.convolved, *self.recurrent))

    @property
    def memory(self) -> RecurrentState:
        """One state for a request."""
        return RecurrentState(wide_numbers=sum(self.sizes), has_kernels=False)


@dataclass(frozen=True, slots=True)
class ForeignLinear:
    """A linear layer by its name, and its sizes."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class ForeignExperts:
    """Experts that transformers stacks in one tensor for each product, by the name of their module:
    `count` of them, whose inner vectors have `width` numbers.
    """

    name: str
    count: int
    width: int
    dim: int
    is_gated: bool
    has_bias: bool


@dataclass(frozen=True, slots=True)
class ForeignDecoder:
    """A causal language model of transformers, in numbers: vocabulary V, hidden width C, the calls
    of attention in their order, of which a layer may have several; or, where its attention is its
    own, the `caches` of its layers and their `states`.

    `first_position` is what the model adds to positions, and `num_positions` how many there are
    then; None: as many as the config says. `position_table`: the module, by its name in the body,
    that is handed the positions which the body counts by itself; None: the body takes positions.
    `release` is the version of transformers. `widest`: numbers of a token's widest activation.
    `linears` are the linear layers, and `open_linears` the names of those whose weight the model's
    code reads by itself; `experts` are those of its mixtures.
    """

    architecture: str
    release: str
    vocab: int
    dim: int
    calls: tuple[ForeignAttention, ...]
    num_parameters: int
    widest: int
    linears: tuple[ForeignLinear, ...]
    open_linears: tuple[str, ...] = ()
    experts: tuple[ForeignExperts, ...] = ()
    first_position: int = 0
    num_positions: int | None = None
    position_table: str | None = None
    caches: tuple[ForeignCache, ...] = ()
    states: tuple[ForeignState, ...] = ()

    @property
    def kept(self) -> tuple[ForeignAttention | ForeignCache | ForeignState, ...]:
        """The contents that are kept, in the order of the layers' memories."""
        return self.calls or (*self.caches, *self.states)

    @property
    def num_layers(self) -> int:
        return len({each.layer for each in self.kept})

    @property
    def memories(self) -> tuple[LayerMemory, ...]:
        return tuple(each.memory for each in self.kept)
