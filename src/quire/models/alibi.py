"""The slopes of linear biases (ALiBi), from `positions.Alibi`. Free of torch."""

from __future__ import annotations

from quire.models.positions import Alibi


def alibi_slopes(alibi: Alibi, heads: int) -> list[float]:
    """The slope of each head (Press et al. 2021, section 3): 2^(-b i / n) for i = 1 to n heads, n
    the largest power of two within `heads` and b the largest bias; further heads have the slopes
    halfway between, from the steepest on.
    """
    power = 1 << (heads.bit_length() - 1)
    step = alibi.max_bias / power
    exponents = [step * i for i in range(1, power + 1)]
    exponents += [step * (i + 0.5) for i in range(heads - power)]
    return [alibi.scale * 2.0**-e for e in exponents]
