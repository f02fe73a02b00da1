"""The arguments for the tokenizer that come with a request (`tokenization_kwargs`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import InvalidParameter, InvalidType, UnknownParameter
from quire.params import checks

TRUNCATIONS = (None, False, True, "longest_first", "only_first", "do_not_truncate")
PADDINGS = (None, False, "do_not_pad", "max_length")
"""The values of `padding`, which prompts that are pooled take."""
ENCODE_PARAMETERS = "add_special_tokens, truncation, max_length and truncation_side"
"""The arguments of encoding, as errors list them."""


def encode_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments as a dict, whether the prompt is a text that they apply to or not.

    `truncate_prompt_tokens` (-1: as many tokens as the model takes) is among them. Raises
    InvalidType, InvalidParameter or UnknownParameter for what a tokenizer does not take.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidType("tokenization_kwargs", given, "it must be a dict")
    for name, value in given.items():
        if not isinstance(name, str) or name not in _CHECKS:
            raise UnknownParameter(str(name), f"{ENCODE_PARAMETERS} exist")
        _CHECKS[name](name, value)
    return dict(given)


def check_truncation(name: str, value: object) -> None:
    """Raise InvalidParameter for another value than those of `TRUNCATIONS`."""
    if not isinstance(value, bool | str | None) or value not in TRUNCATIONS:
        allowed = "True, False, 'longest_first', 'only_first' or 'do_not_truncate' is expected"
        raise InvalidParameter(name, value, allowed)


def check_max_length(name: str, value: object) -> None:
    """Raise InvalidType for anything but an int or None, InvalidParameter for a negative one."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(name, value, "an integer is expected")
    if not 0 <= value <= checks.MAX_INT:
        raise InvalidParameter(name, value, f"it must be from 0 to {checks.MAX_INT}")


def check_side(name: str, value: object) -> None:
    """Raise InvalidParameter for another side than "left" and "right"; None is the tokenizer's."""
    if not isinstance(value, str | None) or value not in (None, "left", "right"):
        raise InvalidParameter(name, value, "it must be 'left' or 'right'")


def check_padding(name: str, value: object) -> None:
    """Raise InvalidParameter for another value than those of `PADDINGS`."""
    if not isinstance(value, bool | str | None) or value not in PADDINGS:
        allowed = "'max_length' or 'do_not_pad' is expected: prompts are not padded to each other"
        raise InvalidParameter(name, value, allowed)


def _later(name: str, value: object) -> None:
    """Do nothing: who cuts the prompt knows the bounds."""


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "add_special_tokens": checks.flag,
    "padding": check_padding,
    "truncation": check_truncation,
    "max_length": check_max_length,
    "truncation_side": check_side,
    "truncate_prompt_tokens": _later,
}
