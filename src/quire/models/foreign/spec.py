"""What Quire knows of a model that runs through transformers. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.models.layer_memory import KeyValues


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
class ForeignLinear:
    """A linear layer by its name, and its sizes."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class ForeignDecoder:
    """A causal language model of transformers, in numbers: vocabulary V, hidden width C, the calls
    of attention in their order, of which a layer may have several.

    `first_position` is what the model adds to positions, and `num_positions` how many there are
    then; None: as many as the config says. `position_table`: the module, by its name in the body,
    that is handed the positions which the body counts by itself; None: the body takes positions.
    `release` is the version of transformers. `widest`: numbers of a token's widest activation.
    `linears` are the linear layers, and `open_linears` the names of those whose weight the model's
    code reads by itself.
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
    first_position: int = 0
    num_positions: int | None = None
    position_table: str | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers, L."""
        return len({call.layer for call in self.calls})

    @property
    def memories(self) -> tuple[KeyValues, ...]:
        """The memory of each call for a request."""
        return tuple(call.memory for call in self.calls)
