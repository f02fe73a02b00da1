"""From the rope keys of a config.json, in all their historical forms, to `positions.Rope`.

Old files have `rope_theta`, `rope_scaling` (with `type` or `rope_type`) and `partial_rotary_factor`
at top level; files written by transformers 5 have them in `rope_parameters`, flat or one object per
layer type. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quire.models.config_reader import ConfigReader, is_number, unsupported
from quire.models.positions import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

_NAMES = {
    "su": "longrope",  # what the first Phi-3 files called it
    "mrope": "default",  # positions of pictures are triples, which are equal for text
}
_AXES = 3
"""Time, row and column."""
LEAST_THETA = 1.1
"""Scalings divide by its logarithm."""
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(
    c: ConfigReader,
    head_dim: int,
    *,
    theta: float = 1e4,
    context: int,
    kinds: tuple[str, ...] = SCALINGS,
    original: int | None = None,
    partial: float = 1.0,
    interleaved: bool = False,
) -> Rope:
    """One rope for all layers. `theta` is the family's default base, `partial` its default share of
    a head that is rotated, `context` its number of positions.

    `kinds` are the scalings that the family may have; `original` takes precedence over the scaling
    object. Raises UnsupportedConfigValue for another scaling.
    """
    section = only_section(c)
    theta = c.number("rope_theta", theta, minimum=LEAST_THETA)
    partial = c.number("partial_rotary_factor", partial, maximum=1.0)
    rope = rope_from(section, head_dim, theta, partial, context, kinds, original)
    return replace(rope, interleaved=interleaved)


def read_ropes(
    c: ConfigReader,
    head_dim: int,
    defaults: dict[str, float],
    *,
    context: int,
    partial: float = 1.0,
) -> dict[str, Rope]:
    """One rope per layer type; `defaults` gives each type's base, `partial` is the family's default
    share of a head. Old files scale only `full_attention`.
    """
    section = only_section(c)
    if section is None or not any(kind in section for kind in defaults):
        sections = {"full_attention": section}
    else:
        sections = {kind: section.section(kind) for kind in defaults}
    return {
        kind: rope_from(sections.get(kind), head_dim, theta, partial, context, SCALINGS, None)
        for kind, theta in defaults.items()
    }


def rope_from(
    section: ConfigReader | None,
    head_dim: int,
    theta: float,
    partial: float,
    context: int,
    kinds: tuple[str, ...],
    original: int | None,
) -> Rope:
    """The rope that one rope object describes, completed from the keys next to it."""
    if section is None:
        return Rope(theta, _rotated(head_dim, partial))
    theta = section.number("rope_theta", theta, minimum=LEAST_THETA)
    partial = section.number("partial_rotary_factor", partial, maximum=1.0)
    if "proportional" in kinds and section.raw("rope_type", None) == "proportional":
        return _proportional(section, head_dim, theta, partial)
    dim = _rotated(head_dim, partial)
    scaling = _scaling(section, context, kinds, original)
    if isinstance(scaling, LongRopeScaling):
        _check_divisors(scaling, dim)
    if isinstance(scaling, DynamicScaling) and dim == 2:
        raise unsupported("rope_type", "dynamic", "another where two values of a head are rotated")
    return Rope(theta, dim, scaling, axes=_axes(section, dim // 2))


def _axes(s: ConfigReader, count: int) -> tuple[int, ...]:
    """The axis of each of `count` frequencies, where those of media share them out."""
    key = "mrope_section"
    sizes, takes_turns = s.raw(key, None), s.flag("mrope_interleaved", False)
    if sizes is None:
        return ()
    is_list = isinstance(sizes, list) and len(sizes) == _AXES
    if not is_list or not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise unsupported(s.at(key), sizes, f"a list of {_AXES} numbers of frequencies")
    if takes_turns:  # time has those that the others do not reach
        return tuple(i % _AXES if i < sizes[i % _AXES] * _AXES else 0 for i in range(count))
    return shared_axes(sizes, count, s.at(key))


def shared_axes(
    sizes: Sequence[int], count: int, name: str = "rope_parameters.mrope_section"
) -> tuple[int, ...]:
    """The axis of each of `count` frequencies: the first `sizes[0]` have the first one, and so on.
    `name` is the key that says it.
    """
    if sum(sizes) != count:
        raise unsupported(name, list(sizes), f"numbers whose sum is {count}")
    return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))


def _proportional(section: ConfigReader, head_dim: int, theta: float, partial: float) -> Rope:
    """Frequencies of the whole head, of which the first share turns."""
    scaling = ProportionalScaling(int(partial * head_dim // 2), section.number("factor", 1.0))
    return Rope(theta, head_dim, scaling)


def _rotated(head_dim: int, partial: float) -> int:
    """The number of values of a head that are rotated."""
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        allowed = f"a factor that makes an even number of head_dim={head_dim}, at least 2"
        raise unsupported("partial_rotary_factor", partial, allowed)
    return dim


def only_section(c: ConfigReader) -> ConfigReader | None:
    """The object of a rotation, under its old name where a file has both, as transformers reads it.
    Raises UnsupportedConfigValue where they contradict each other.
    """
    section, old = c.section("rope_parameters"), c.section("rope_scaling")
    if section is None or old is None:
        return old if section is None else section
    names = section.keys()
    for key in names:
        if section.raw(key) != old.raw(key, None):
            allowed = f"that of rope_scaling, which is {old.raw(key, None)!r}"
            raise unsupported(section.at(key), section.raw(key), allowed)
    return old


def _scaling(
    s: ConfigReader, context: int, kinds: tuple[str, ...], original: int | None
) -> RopeScaling | None:
    named = s.raw("rope_type", None) or s.raw("type", "default")
    s.ignore("type")  # files for both generations of readers carry both spellings
    kind = _NAMES.get(named, named) if isinstance(named, str) else None
    if kind is None or kind not in kinds:
        raise unsupported("rope_type", named, ", ".join(kinds))
    if kind == "default":
        s.raw("original_max_position_embeddings", None)  # written even where nothing is scaled
        return None
    if kind == "linear":
        return LinearScaling(s.number("factor"))
    if kind == "dynamic":
        s.only("original_max_position_embeddings", context)
        return DynamicScaling(s.number("factor"), context)
    if original is not None:
        s.only("original_max_position_embeddings", original)
    written = s.integer("original_max_position_embeddings", context, minimum=2)
    return _READERS[kind](s, context, original or written)


def _llama3(s: ConfigReader, context: int, original: int) -> RopeScaling:
    low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
    if low > high:
        raise unsupported("low_freq_factor", low, f"at most high_freq_factor={high}")
    return Llama3Scaling(s.number("factor"), low, high, original)


def _yarn(s: ConfigReader, context: int, original: int) -> RopeScaling:
    # `attn_factor` is vLLM's: the publishers of such files (R1-0528-Qwen3-8B) mean what it does
    factor = s.number("factor", context / original)
    scale, scale_all = (s.number(key, None, minimum=0.0) for key in ("mscale", "mscale_all_dim"))
    derived = _yarn_attention(factor, 1.0)
    if scale and scale_all:
        derived = _yarn_attention(factor, scale) / _yarn_attention(factor, scale_all)
    return YarnScaling(
        factor=factor,
        original=original,
        beta_fast=s.number("beta_fast", 32.0),
        beta_slow=s.number("beta_slow", 1.0),
        attention_factor=s.number("attention_factor", derived) * s.number("attn_factor", 1.0),
        truncate=s.flag("truncate", True),
    )


def _yarn_attention(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0  # YaRN, equation 22


def _longrope(s: ConfigReader, context: int, original: int) -> RopeScaling:
    factor = s.number("factor", context / original)
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    given = s.number("attention_factor", derived)
    return LongRopeScaling(
        short=_divisors(s, "short_factor"),
        long=_divisors(s, "long_factor"),
        original=original,
        attention_factor=s.number("short_mscale", given),  # Phi-3.5-MoE
        long_attention_factor=s.number("long_mscale", given),
    )


def _divisors(s: ConfigReader, key: str) -> tuple[float, ...]:
    values = s.raw(key)
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise unsupported(key, values, "a list of positive numbers")
    return tuple(float(v) for v in values)


def _check_divisors(scaling: LongRopeScaling, dim: int) -> None:
    for key, divisors in (("short_factor", scaling.short), ("long_factor", scaling.long)):
        if len(divisors) != dim // 2:
            raise unsupported(key, f"{len(divisors)} numbers", f"{dim // 2}, one per frequency")


_READERS = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
