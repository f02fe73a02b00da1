"""The checks of parameters: each returns the value in its plain form or raises by name.

Numbers of any library are taken (`numbers.Real`, `numbers.Integral`) and come back as Python's own,
so that they encode and compare exactly; a bool is never a number here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import msgspec

from quire.errors import InvalidParameter, InvalidType, UnknownParameter

MAX_FLOAT32 = 3.4028234663852886e38
MIN_FLOAT32 = 1.1754943508222875e-38
"""The normal float32 numbers: what lies outside becomes infinity or zero in the sampler."""
MAX_INT = 2**31 - 1
"""No count of tokens is larger."""

_Item = TypeVar("_Item")


_BEAMS = "Give BeamSearchParams to LLM.beam_search."
_FORMER = {
    "best_of": "Ask for n completions with logprobs=0, and choose by cumulative_logprob.",
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "guided_decoding": "Use structured_outputs=StructuredOutputsParams(...).",
    "logits_processors": "Give the engine a class that edits logits: LLM(logits_processors=[...]).",
}
"""Names of earlier releases -> what to do instead; programs still pass them as None."""


class CheckedMeta(msgspec.StructMeta):
    """Makes a Struct refuse an unknown keyword by name, as `UnknownParameter` (a TypeError too)."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        # the name itself as default: a field that was not given is not None
        for name in [name for name in _FORMER.keys() - known if fields.get(name, name) is None]:
            del fields[name]
        for name in fields:
            if name not in known:
                public = ", ".join(field for field in known if not field.startswith("_"))
                hint = _FORMER.get(name, "")
                raise UnknownParameter(name, f"{cls.__name__} has {public}", hint)
        return super().__call__(*args, **fields)


_DIGITS = re.compile("0|[1-9][0-9]{0,9}")


def number(name: str, value: object, low: float, high: float, allowed: str) -> float:
    """`value` as a float when low <= value <= high, which no NaN is."""
    # plain values first: the abstract classes take longer to ask
    if value.__class__ is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise InvalidType(name, value, allowed)
    if not low <= value <= high:  # type: ignore[operator]
        raise InvalidParameter(name, value, allowed)
    return float(value)  # type: ignore[arg-type]


def integer(name: str, value: object, low: int, high: int, allowed: str) -> int:
    """`value` as an int when low <= value <= high."""
    if value.__class__ is not int and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise InvalidType(name, value, allowed)
    if not low <= value <= high:  # type: ignore[operator]
        is_told = value < low or "at least" not in allowed  # type: ignore[operator]
        raise InvalidParameter(name, value, allowed if is_told else f"{allowed}, at most {high}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def token_ids(name: str, written: Sequence[object]) -> list[int]:
    """Token ids as keys of JSON write them, or as they are: digits from 0 to 9 without sign, blank
    or leading zero. What `int()` takes besides, as "1_0", " 1" or Arabic digits, is refused, all
    such keys at once.
    """
    wrong = [each for each in written if not _is_token_id(each)]
    if wrong:
        value = wrong[0] if len(wrong) == 1 else wrong
        raise InvalidParameter(name, value, "a token id is written with the digits 0 to 9 alone")
    return [int(each) for each in written]  # type: ignore[call-overload]


def _is_token_id(written: object) -> bool:
    if isinstance(written, str):
        return _DIGITS.fullmatch(written) is not None
    return isinstance(written, Integral) and not isinstance(written, bool)


def flag(name: str, value: object) -> bool:
    """`value` when it is True or False."""
    if not isinstance(value, bool):
        raise InvalidType(name, value, "it must be True or False")
    return value


def text(name: str, value: object) -> str:
    """`value` when it is a str that has a UTF-8 form (no lone surrogates)."""
    if not isinstance(value, str):
        raise InvalidType(name, value, "it must be a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        allowed = "it must be valid Unicode without lone surrogates"
        raise InvalidParameter(name, ascii(value[:40]), allowed) from None
    return value


def texts(name: str, value: object, max_items: int, max_chars: int) -> list[str]:
    """`value` (None, a str, or several) as a list of different non-empty strings."""
    if value is None:
        return []
    items = [value] if isinstance(value, str) else value
    items = sequence(name, items, f"a str or a list of at most {max_items} strings", max_items)
    for item in items:
        if text(name, item) == "":
            raise InvalidParameter(name, value, "no string in it may be empty")
    if sum(map(len, items)) > max_chars:
        raise InvalidParameter(name, "...", f"it may have at most {max_chars} characters in all")
    return without_repeats(items)


def sequence(name: str, value: object, kind: str, max_items: int) -> Sequence[Any]:
    """`value` when it is a list or tuple of at most `max_items`; its items are not checked."""
    if not isinstance(value, (list, tuple)):
        raise InvalidType(name, value, f"it must be {kind}")
    if len(value) > max_items:
        raise InvalidParameter(name, f"<{len(value)} items>", f"it must be {kind}")
    return value


def integers(name: str, value: object, max_items: int) -> list[int]:
    """`value` (a list or tuple) as a list of ints of any size."""
    ids = sequence(name, value, f"a list of at most {max_items} ints", max_items)
    if set(map(type, ids)) == {int} and min(ids) >= -(2**63) and max(ids) < 2**63:
        return list(ids)  # one by one takes a second for a million
    return [integer(name, item, -(2**63), 2**63 - 1, "each item must be an int") for item in ids]


def in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise for the first of the ids that is not one of the model's."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            allowed = f"it is out of vocabulary: ids are 0 to {vocab_size - 1}"
            raise InvalidParameter(name, token_id, allowed)


def prompt_ids(token_ids: list[int], text: str | None, vocab_size: int) -> None:
    """Raise for a prompt (of `text`) without ids, or with one that the model does not have."""
    if not token_ids:
        allowed = "it must have at least one token"
        raise InvalidParameter("prompt", token_ids if text is None else text, allowed)
    # the loop that finds the wrong id only where there is one
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        in_vocabulary("prompt_token_ids", token_ids, vocab_size)


def without_repeats(items: Iterable[_Item]) -> list[_Item]:
    """The items in order, each once."""
    return list(dict.fromkeys(items))


def wire_ints(name: str, value: object, depth: int = 0) -> None:
    """Raise unless every int anywhere in `value` fits 64 bits, as messages need it."""
    if depth > 32:
        raise InvalidParameter(name, "...", "it may be nested at most 32 levels deep")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            wire_ints(name, item, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidParameter(name, value, f"{name} integers must fit 64 bits")
