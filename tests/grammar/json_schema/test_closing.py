"""Which objects are closed: by schemas, what they become, and texts that follow them."""

import pytest

from quire.grammar.json_schema.openness import Openness
from tests.grammar.json_schema.unfolded import prepared, unfolded

INT, TEXT = {"type": "integer"}, {"type": "string"}


def an_object(*required, **properties):
    made = {"type": "object", "properties": properties, "required": list(required)}
    made = {name: value for name, value in made.items() if value}
    return {**made, "additionalProperties": False}


CLOSED = {
    "itself": ({"type": "object", "properties": {"a": INT}}, an_object(a=INT)),
    "none declared": ({"type": "object", "properties": {}}, an_object()),
    "only required": (
        {"type": "object", "properties": {"a": INT}, "required": ["a", "b"]},
        {
            "type": "object",
            "properties": {"a": INT, "b": {}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    ),
    "by a reference": (
        {"$ref": "#/$defs/o", "$defs": {"o": {"type": "object", "properties": {"a": INT}}}},
        an_object(a=INT),
    ),
    "by a reference and itself": (
        {
            "$ref": "#/$defs/o",
            "type": "object",
            "properties": {"b": TEXT},
            "$defs": {"o": {"properties": {"a": INT}, "required": ["a"]}},
        },
        an_object("a", a=INT, b=TEXT),
    ),
    "merged": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": INT}, "required": ["a"]},
                {"properties": {"b": TEXT}},
            ]
        },
        an_object("a", a=INT, b=TEXT),
    ),
    "merged with its own": (
        {
            "type": "object",
            "properties": {"c": INT},
            "allOf": [{"$ref": "#/$defs/o"}],
            "$defs": {"o": {"properties": {"a": INT}}},
        },
        an_object(c=INT, a=INT),
    ),
    "merged deeply": (
        {
            "type": "object",
            "allOf": [{"allOf": [{"properties": {"a": INT}}, {"minProperties": 0}]}],
        },
        an_object(a=INT),
    ),
    "in an alternative": (
        {"anyOf": [{"type": "object", "properties": {"a": INT}}, {"type": "null"}]},
        {"anyOf": [an_object(a=INT), {"type": "null"}]},
    ),
    "with what alternatives add": (
        {
            "type": "object",
            "properties": {"a": INT},
            "anyOf": [{"required": ["a"]}, {"properties": {"b": TEXT}, "required": ["b"]}],
        },
        {"anyOf": [an_object("a", a=INT), an_object("b", a=INT, b=TEXT)]},
    ),
    "in a list": (
        {"type": "array", "items": {"type": "object", "properties": {"a": INT}}},
        {"type": "array", "items": an_object(a=INT)},
    ),
    "within one that is open": (
        {
            "type": "object",
            "properties": {"a": {"type": "object", "properties": {"b": INT}}},
            "additionalProperties": True,
        },
        {"type": "object", "properties": {"a": an_object(b=INT)}},
    ),
}
OPEN = {
    "no properties declared": {"type": "object"},
    "said so": {"type": "object", "properties": {"a": INT}, "additionalProperties": True},
    "values of a kind": {"type": "object", "properties": {"a": INT}, "additionalProperties": TEXT},
    "unevaluated": {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": TEXT},
    "patterns": {"type": "object", "properties": {"a": INT}, "patternProperties": {"^x": TEXT}},
    "said by a branch": {
        "type": "object",
        "properties": {"a": INT},
        "allOf": [{"additionalProperties": True}],
    },
    "said by a reference": {
        "properties": {"a": INT},
        "$ref": "#/$defs/open",
        "$defs": {"open": {"type": "object", "additionalProperties": True}},
    },
    "names only": {"type": "object", "propertyNames": {"pattern": "^x"}},
    "required only": {"type": "object", "required": ["a"]},
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed(name):
    given, closed = CLOSED[name]
    assert unfolded(given) == closed


@pytest.mark.parametrize("name", OPEN)
def test_not_closed(name):
    assert unfolded(OPEN[name]) == unfolded(OPEN[name], Openness.OPEN)
    assert unfolded(OPEN[name]).get("additionalProperties") is not False or "patternProp" in str(
        unfolded(OPEN[name])
    )


def test_the_option_opens_objects_and_the_other_shuts_them():
    given = {"type": "object", "properties": {"a": {"type": "object"}}}
    inner = {"type": "object", "properties": {"a": {"type": "object"}}}
    assert unfolded(given, Openness.OPEN) == inner
    shut = {"type": "object", "additionalProperties": False}
    assert unfolded(given, Openness.SHUT) == an_object(a=shut)
    said = {"type": "object", "properties": {"a": INT}, "additionalProperties": True}
    assert "additionalProperties" not in unfolded(said, Openness.SHUT)


WORDS = ("properties", "default", "const", "enum", "$ref", "allOf", "additionalProperties", "$defs")


@pytest.mark.parametrize("name", WORDS)
def test_names_are_names(name):
    """A property may be called like a keyword, and so may a definition."""
    inner = {"type": "object", "properties": {"x": INT}}
    given = {"type": "object", "properties": {name: inner}, "required": [name]}
    assert unfolded(given) == an_object(name, **{name: an_object(x=INT)})
    given = {"$ref": f"#/$defs/{name}", "$defs": {name: inner}}
    assert unfolded(given) == an_object(x=INT)
    given = {"type": "object", "patternProperties": {f"^{name[-1]}$": inner}}
    assert unfolded(given)["patternProperties"] == {f"^{name[-1]}$": an_object(x=INT)}


VALUE = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}, "x": [1]}


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_values_are_values(keyword):
    """They look like schemas, and are what has to come out."""
    value = VALUE if keyword == "const" else [VALUE, {"properties": {}}]
    given = {"type": "object", "properties": {"v": {keyword: value}}, "required": ["v"]}
    assert unfolded(given) == an_object("v", v={keyword: value})


@pytest.mark.parametrize("keyword", ["default", "examples", "example", "x-note", "description"])
def test_notes_are_nothing(keyword):
    given = {"type": "object", "properties": {"a": INT}, keyword: {"properties": {"b": 7}}}
    assert unfolded(given) == an_object(a=INT)
    assert prepared(given).unenforced == ()


def test_values_that_a_closed_object_would_not_have_stay():
    given = {"type": "object", "properties": {"a": INT}, "enum": [{"a": 1, "b": 2}, {"a": "x"}, {}]}
    assert unfolded(given) == {"enum": [{"a": 1, "b": 2}, {}]}


def test_unevaluated_properties_know_what_is_joined():
    joined = {
        "allOf": [{"properties": {"a": INT}}],
        "properties": {"b": INT},
        "unevaluatedProperties": False,
        "type": "object",
    }
    assert unfolded(joined) == an_object(a=INT, b=INT)
    inside = {
        "type": "object",
        "properties": {"a": INT},
        "allOf": [{"properties": {"b": INT}, "unevaluatedProperties": False}],
    }
    assert unfolded(inside) == {
        "type": "object",
        "properties": {"b": INT},
        "additionalProperties": False,
    }
