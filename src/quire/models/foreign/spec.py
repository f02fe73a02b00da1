"""What Quire knows of a model that runs through transformers. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.models.layer_memory import KeyValues


@dataclass(frozen=True, slots=True)
class ForeignAttention:
    """One layer's attention as transformers calls it: H query heads over K key/value heads of D
    numbers, of which values have the first `value_dim`. `layer` is transformers' number of the
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
class ForeignDecoder:
    """A causal language model of transformers, in numbers: vocabulary V, hidden width C, the layers
    in the order in which they are called.

    `first_position` is what the model adds to positions, and `num_positions` how many there are
    then; None: as many as the config says. `release` is the version of transformers. `widest`:
    numbers of a token's widest activation. `open_linears` are the linear layers whose weight the
    model's code reads by itself, by name.
    """

    architecture: str
    release: str
    vocab: int
    dim: int
    layers: tuple[ForeignAttention, ...]
    num_parameters: int
    widest: int
    open_linears: tuple[str, ...] = ()
    first_position: int = 0
    num_positions: int | None = None

    @property
    def memories(self) -> tuple[KeyValues, ...]:
        """What each layer remembers of a request."""
        return tuple(layer.memory for layer in self.layers)
