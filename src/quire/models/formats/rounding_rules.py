"""Rules by which an engine rounds a plain checkpoint's weights at loading, by kind of module
and by name: its `quantization_config`. Free of torch; `quantization/recipe.py` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from quire.errors import InvalidParameter, UnsupportedConfigValue
from quire.models.formats.expressions import Expressions

ONLINE = "online"
"""Value of `quantization` with which `quantization_config` alone says what is rounded."""

BITS_PER_WEIGHT: Mapping[str, float] = MappingProxyType(
    {
        "fp8": 8.0,
        "int8": 8.0,
        "int8_weight_only": 8.0,
        "int4": 4.5,
        "int4_g64": 4.25,
        "int4_g128": 4.125,
        "int4_weight_only": 4.5,
    }
)
"""Scheme -> bits of the layers' weights: int4 has a scale of 16 bits for every group."""

OTHER_NAMES = {"fp8_per_channel": "fp8", "int8_per_channel_weight_only": "int8_weight_only"}
"""Values of `quantization` that mean the same as others."""

HEAD_BITS = 8.0
"""Bits of a head's weight in every scheme."""

_SCALE_BITS = 16

Kind = Literal["linear", "moe", "head"]
_NEVER = ("router.weight", ".kv_b.weight")
"""Leaves that keep their values: scores of experts, and the heads of latents, which are small."""
_NAME = "quantization_config"
_KEYS = ("linear", "moe", "head", "ignore", "targets")
_PATTERN = "re:"


class RoundingRules(msgspec.Struct, frozen=True):
    """The scheme of each kind of module, None where weights keep their values: projections of
    attention and of dense feed-forward parts, experts, and the head. `targets`: names of modules or
    expressions with schemes of their own; the first that matches counts.
    """

    linear: str | None
    moe: str | None
    head: str | None
    targets: tuple[tuple[str, str | None], ...] = ()

    def schemes(self) -> set[str]:
        """All schemes that may be used."""
        found = {self.linear, self.moe, self.head, *(scheme for _, scheme in self.targets)}
        return {scheme for scheme in found if scheme is not None}

    def scheme_finder(self) -> Callable[[Kind, str], str | None]:
        """Return the function that finds a module's scheme by its kind and stored name."""
        expressions = Expressions()
        rules = [(_matcher(name, expressions), scheme) for name, scheme in self.targets]
        kinds = {"linear": self.linear, "moe": self.moe, "head": self.head}

        def scheme_of(kind: Kind, module: str) -> str | None:
            for matches, scheme in rules:
                if matches(module):
                    return scheme
            return kinds[kind]

        return scheme_of


def _matcher(name: str, expressions: Expressions) -> Callable[[str], bool]:
    """Whether a module has this name, or its last parts are this, or the expression matches."""
    if not name.startswith(_PATTERN):
        return lambda module: f".{module}".endswith(f".{name}")
    [pattern] = expressions.compile([name.removeprefix(_PATTERN)], _NAME)
    return lambda module: pattern.match(module) is not None


def rounding(given: str | None) -> str | None:
    """The value of `quantization` under the name that it has here."""
    return given if given is None else OTHER_NAMES.get(given, given)


def group_of(given: str | None) -> int:
    """The inputs with one scale in the scheme of `quantization`; 0: all of them, or none."""
    bits = BITS_PER_WEIGHT.get(rounding(given) or "", HEAD_BITS)
    return 0 if bits == HEAD_BITS else round(_SCALE_BITS / (bits - 4))


def kind_of(leaf: str) -> Kind | None:
    """The kind of the module whose weight a leaf of the decoder is; None: it is never rounded."""
    if leaf.endswith(_NEVER):
        return None
    if leaf == "head.weight":
        return "head"
    return "moe" if ".experts." in leaf else "linear"


def read_rounding_rules(
    quantization: str | None, config: Mapping[str, Any] | None
) -> RoundingRules | None:
    """The rules of these two options; None where the first says all. Raises InvalidParameter."""
    if not config:
        if quantization == ONLINE:
            raise InvalidParameter(
                "quantization", ONLINE, f"{ONLINE} with {_NAME}", "Pass 'int8', or say by kind."
            )
        return None
    if unknown := sorted(set(config) - set(_KEYS)):
        raise InvalidParameter(_NAME, unknown, f"the keys {', '.join(_KEYS)}")
    base = None if quantization == ONLINE else quantization
    kinds = {key: _scheme(key, config.get(key, base)) for key in ("linear", "moe", "head")}
    ignored, targets = config.get("ignore") or [], config.get("targets") or {}
    if not isinstance(ignored, list | tuple) or not all(isinstance(n, str) for n in ignored):
        raise InvalidParameter(f"{_NAME}['ignore']", ignored, "a list of names and expressions")
    if not isinstance(targets, dict) or not all(isinstance(n, str) for n in targets):
        raise InvalidParameter(f"{_NAME}['targets']", targets, "an object of schemes by name")
    own = tuple((name, _scheme(name, scheme)) for name, scheme in targets.items())
    rules = RoundingRules(**kinds, targets=(*((name, None) for name in ignored), *own))
    try:
        # compiled here once, so that a bad expression is the fault of an option and not of a
        # worker's start
        rules.scheme_finder()
    except UnsupportedConfigValue as error:
        raise InvalidParameter(_NAME, dict(config), str(error)) from None
    if not rules.schemes():
        raise InvalidParameter(_NAME, dict(config), "a scheme for at least one kind or name")
    return rules


def _scheme(key: str, value: Any) -> str | None:
    chosen = rounding(value) if isinstance(value, str) else value
    if chosen is not None and chosen not in BITS_PER_WEIGHT:
        allowed = f"None, or one of {', '.join(BITS_PER_WEIGHT)}"
        raise InvalidParameter(f"{_NAME}[{key!r}]", value, allowed)
    return chosen
