"""Rotary tables: the cosines and sines of every position, from a `positions.Rope`.

Two scalings depend on how long the context is. transformers chooses by the longest sequence of the
call, which changes the meaning of keys that are already cached; a paged cache needs one choice for
the whole run, and ours follows `max_model_len`:

- dynamic: up to the original length the frequencies are the unscaled ones, equal to transformers
  for every prompt. With a longer `max_model_len` they are those that transformers uses for a
  sequence of exactly that length, from the first token on.
- longrope: the short divisors up to the original length, the long ones for all positions if
  `max_model_len` exceeds it; equal to transformers for all sequences on the same side of that
  border.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.positions import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Temperature,
    YarnScaling,
)
from quire.ops import RotaryTable

_ROWS = 1024
"""Positions that are computed together: their angles stay in the caches, in the same memory."""


def rotary_table(
    rope: Rope, max_model_len: int, device: torch.device, learned: Tensor | None = None
) -> RotaryTable:
    """The table of `rope` for positions below `max_model_len`, in fp32 with attention scaling
    folded in. `learned` [dim / 2]: the numbers that `Rope` has where it is learned.
    """
    inverse, attention_factor = frequencies(rope, max_model_len)
    if learned is not None:
        inverse = inverse * learned.float().cpu().exp()
    half = len(inverse)
    table = torch.empty((max_model_len, 2 * half), dtype=torch.float32)
    for first in range(0, max_model_len, _ROWS):
        rows = table[first : first + _ROWS]
        positions = torch.arange(first, first + len(rows), dtype=torch.float32)
        angles = torch.outer(positions, inverse)
        torch.mul(angles.cos(), attention_factor, out=rows[:, :half])
        torch.mul(angles.sin(), attention_factor, out=rows[:, half:])
    return RotaryTable(table.to(device), rope.dim, rope.interleaved)


def query_factors(t: Temperature, max_model_len: int) -> Tensor:
    """Factors of queries at positions below `max_model_len`, fp32."""
    positions = torch.arange(max_model_len, dtype=torch.float32)
    return torch.log1p(((positions + t.first) / t.interval).floor()) * t.strength + 1.0


def log_positions(max_model_len: int) -> Tensor:
    """ln(1 + position) of positions below `max_model_len`, fp32."""
    return torch.arange(1, max_model_len + 1, dtype=torch.float32).log()


def frequencies(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position [dim / 2] in fp32, and the factor on cos and sin.

    Formulas and their order of rounding are those of transformers' modeling_rope_utils.py.
    """
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        return _plain(_stretched_theta(rope, scaling, max_model_len), rope.dim), 1.0
    if isinstance(scaling, LinearScaling):
        return _plain(rope.theta, rope.dim) / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(_plain(rope.theta, rope.dim), scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(rope, scaling), scaling.attention_factor
    if isinstance(scaling, LongRopeScaling):
        return _longrope(rope, scaling, max_model_len)
    if isinstance(scaling, ProportionalScaling):
        inverse = _plain(rope.theta, rope.dim) / scaling.factor
        inverse[scaling.turning :] = 0.0
        return inverse, 1.0
    return _plain(rope.theta, rope.dim), 1.0


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(dim)


def _stretched_theta(rope: Rope, s: DynamicScaling, max_model_len: int) -> float:
    if max_model_len <= s.original:
        return rope.theta
    stretch = s.factor * max_model_len / s.original - (s.factor - 1)
    return float(rope.theta * stretch ** (rope.dim / (rope.dim - 2)))


def _llama3(inverse: Tensor, s: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / inverse
    low, high = s.low_freq_factor, s.high_freq_factor
    ramp = (s.original / wavelength - low) / (high - low or 1.0)  # without a ramp, never used
    between = (1 - ramp) * inverse / s.factor + ramp * inverse
    scaled = torch.where(wavelength > s.original / low, inverse / s.factor, between)
    return torch.where(wavelength < s.original / high, inverse, scaled)


def _yarn(rope: Rope, s: YarnScaling) -> Tensor:
    powers = rope.theta ** _exponents(rope.dim)
    kept = 1 - _ramp(*_yarn_range(rope, s), rope.dim // 2)
    return 1.0 / (s.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_range(rope: Rope, s: YarnScaling) -> tuple[float, float]:
    low, high = (_yarn_dimension(turns, rope, s.original) for turns in (s.beta_fast, s.beta_slow))
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rope.dim - 1)


def _yarn_dimension(turns: float, rope: Rope, original: int) -> float:
    """The dimension whose frequency makes this many turns over the original context."""
    return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _ramp(low: float, high: float, length: int) -> Tensor:
    if low == high:
        high += 0.001  # a step, without dividing by zero
    return ((torch.arange(length, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _longrope(rope: Rope, s: LongRopeScaling, max_model_len: int) -> tuple[Tensor, float]:
    divisors, factor = s.short, s.attention_factor
    if max_model_len > s.original:
        divisors, factor = s.long, s.long_attention_factor
    lengths = torch.tensor(divisors, dtype=torch.float32) * rope.theta ** _exponents(rope.dim)
    return 1.0 / lengths, factor
