"""Positions in attention: rotations, biases on scores, temperatures, as parts of a spec."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware base that grows beyond `original` tokens; see `models/rotary_tables.py`."""

    factor: float
    original: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp to kept frequencies; cos, sin times `attention_factor`."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): one divisor per frequency, `long` for contexts beyond `original`
    tokens, else `short`; cos and sin times `attention_factor`, or `long_attention_factor` with the
    long ones.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float
    long_attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first `turning` frequencies turn, divided by `factor`; others are 0 (Gemma 4)."""

    turning: int
    factor: float = 1.0


RopeScaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first `dim` values of each head: value i is paired with i +
    dim / 2 or, where `interleaved`, with its neighbour. `axes`: the axis of positions that each of
    the dim / 2 frequencies is for, where tokens have positions on several; (): on one. `learned`:
    frequencies are multiplied by the exponentials of dim / 2 numbers, a leaf of the decoder.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    axes: tuple[int, ...] = ()
    learned: bool = False


@dataclass(frozen=True, slots=True)
class Alibi:
    """Linear biases on scores instead of positions (Press et al. 2021): slope * (key's position -
    query's), times `scale`; minus the distance to both sides in attention over whole prompts. See
    models/alibi.py.
    """

    max_bias: float = 8.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BucketBias:
    """A learned number for each head and bucket of distances, which is added to scores (Raffel et
    al. 2020): half of the `buckets` are of keys after the query, and on each side half of them are
    of one distance and the others grow by a factor up to `max_distance`. `is_shared`: all layers
    have the same numbers.
    """

    buckets: int
    max_distance: int
    is_shared: bool = True


@dataclass(frozen=True, slots=True)
class DisentangledScores:
    """Products of queries with keys of positions (`has_keys`), and of keys with queries of
    positions (`has_queries`), which are added to scores (He et al. 2021). Those of positions are
    products of a table that all layers share, of 2 * `span` vectors.

    `max_distance`: distances beyond half the span grow by a factor up to it; None: each of `span`
    on both sides has its own row. `shares_products`: with the weights of the layer's queries and
    keys, not with further ones. `eps`: of a layer norm of the table; None: it has none.
    """

    span: int
    max_distance: int | None
    has_keys: bool = True
    has_queries: bool = True
    shares_products: bool = False
    eps: float | None = None


DistanceScores = BucketBias | DisentangledScores
"""Scores that depend on the distance of a key from its query, in attention over whole prompts."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries times 1 + `strength` * ln(1 + floor((position + `first`) / `interval`)): the first
    position counts as 1 in Llama 4, and as 0 in Ministral 3.
    """

    strength: float
    interval: float
    first: int = 1


@dataclass(frozen=True, slots=True)
class LearnedTemperature:
    """Queries times scale * ln(1 + position) + bias, two learned numbers of each head."""
