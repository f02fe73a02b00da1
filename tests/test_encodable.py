"""Texts and values on their way out of a process: each is encoded, or refused in a sentence."""

import dataclasses
import json

import msgspec
import pytest

from quire.encodable import (
    MOST_LEVELS,
    NotEncodable,
    check_levels,
    json_or_repr,
    plain_text,
    text_of,
    to_json,
    to_msgpack,
)
from quire.engine.wire.messages import UtilityOutput
from quire.errors import EngineError, InvalidParameter

HALF, PLAIN = "a\udc80b", "a\\udc80b"


class Pair(msgspec.Struct, array_like=True, frozen=True):
    name: str
    inner: object = None


@dataclasses.dataclass
class Data:
    name: str
    inner: object = None


def nested(levels, value=0):
    for _ in range(levels):
        value = [value]
    return value


def cyclic():
    found = {}
    found["a"] = found
    return found


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("", ""),
        ("ascii", "ascii"),
        ("é\U0001f600", "é\U0001f600"),
        ("\ud83d\ude00", "\\ud83d\\ude00"),
        ("é\ud800", "é\\ud800"),
        (HALF, PLAIN),
    ],
)
def test_halves_of_pairs_become_escapes(text, plain):
    assert plain_text(text) == plain
    assert plain_text(text).encode().decode() == plain


VALUES = [
    (HALF, PLAIN),
    ([1, (HALF, None)], [1, [PLAIN, None]]),
    ({HALF: {"b": HALF}, "c": 1.5}, {PLAIN: {"b": PLAIN}, "c": 1.5}),
    (Pair(HALF, [HALF]), [PLAIN, [PLAIN]]),
    (Data(HALF, Pair("b", HALF)), {"name": PLAIN, "inner": ["b", PLAIN]}),
    ({"set": {HALF}}, {"set": [PLAIN]}),
]


@pytest.mark.parametrize(("value", "plain"), VALUES)
def test_a_value_leaves_with_plain_texts_wherever_they_are(value, plain):
    assert json.loads(to_json(value)) == plain
    assert msgspec.msgpack.decode(to_msgpack(value)) == plain


def test_other_values_leave_as_they_are():
    value = {"a": [1, 2.5, None, True, "é"], "b": {"c": [-(2**63), 2**64 - 1]}}
    assert json.loads(to_json(value)) == value == msgspec.msgpack.decode(to_msgpack(value))
    assert json.loads(to_json(2**70)) == 2**70, "JSON has ints of any size"


@pytest.mark.parametrize("is_half", [False, True], ids=["", "with a lone surrogate"])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (cyclic(), "it is nested too deeply, or holds itself"),
        (nested(3000), "it is nested too deeply, or holds itself"),
        (object(), "Encoding objects of type object is unsupported"),
        (2**64, "it has an int of more than 64 bits"),
    ],
    ids=["cyclic", "deep", "object", "large int"],
)
def test_what_has_no_form_is_refused_in_a_sentence(value, why, is_half):
    value = [HALF, value] if is_half else value
    with pytest.raises(NotEncodable) as caught:
        to_msgpack(value)
    assert str(caught.value) == why
    if "64 bits" not in why:
        with pytest.raises(NotEncodable):
            to_json(value)


def test_levels_are_bounded():
    check_levels(nested(MOST_LEVELS))
    for value in (nested(MOST_LEVELS + 1), cyclic(), {"a": [Data("b", nested(MOST_LEVELS))]}):
        with pytest.raises(NotEncodable, match="it is nested more than 64 levels deep"):
            check_levels(value)


class Raising:
    """A dataclass, as far as the encoders can see, whose fields cannot be read."""

    __dataclass_fields__ = Data.__dataclass_fields__

    @property
    def name(self):
        raise LookupError("no name")

    inner = name


class RaisingDict(dict):
    def keys(self):
        raise LookupError("no keys")

    items = values = keys


@pytest.mark.parametrize("value", [Raising(), [Raising(), HALF], RaisingDict({HALF: HALF})])
def test_what_raises_when_it_is_read_is_refused_or_sent(value):
    for read in (to_json, to_msgpack, check_levels):
        try:
            read(value)
        except NotEncodable as error:
            assert str(error).startswith("to read it raises LookupError: no ")
    answer = UtilityOutput.of_result(5, value)
    assert answer.failure_message.startswith("The result cannot be sent to another process: to ")


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("plain"), "plain"),
        (ValueError(HALF), PLAIN),
        (EngineError(""), "EngineError"),
        (KeyError(), "KeyError"),
        (Mute(), "Mute"),
        (ValueError("x" * 10**6), "x" * 2**14),
    ],
)
def test_the_text_of_any_error(error, text):
    assert text_of(error) == text


class Unshown:
    def __repr__(self):
        raise ValueError("no repr")


@pytest.mark.parametrize("value", [cyclic(), nested(3000), Unshown(), [Unshown()], (HALF, 2**70)])
def test_an_error_can_be_made_of_any_value(value):
    error = InvalidParameter("field", value, "it must be small")
    assert str(error).startswith("field=") and "is not allowed: it must be small." in str(error)
    assert len(str(error)) < 200
    assert "it must be small" in error.described(json_or_repr)
