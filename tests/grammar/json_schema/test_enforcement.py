"""Schemas that libraries misread: long numbers, double names, patterns of declared names."""

import importlib.util
import json

import pytest

from quire.grammar.json_schema.places import SchemaError
from quire.grammar.library import GrammarError
from quire.grammar.source import source_of
from quire.params import StructuredOutputsParams
from tests.grammar.json_schema.unfolded import prepared
from tests.grammar.json_schema.verdicts import Judge

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
BACKENDS = [
    "guidance",
    pytest.param(
        "xgrammar",
        marks=pytest.mark.skipif(not HAS_XGRAMMAR, reason="xgrammar is not installed"),
    ),
]


@pytest.fixture(scope="module", params=BACKENDS)
def judge(request):
    return Judge.of(request.param)


INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
NUMBERS = {
    "a constant above 2^53": ({"const": 1234567890123456789}, ["1234567890123456789"],
        ["1234567890123456768", "1234567890123456788", "1.234567890123456789e18"]),
    "constants around 2^53": ({"enum": [2**53, 2**53 + 1]},
        ["9007199254740992", "9007199254740993"], ["9007199254740991", "9007199254740994"]),
    "constants beyond 64 bits": ({"enum": [2**63, -(2**63) - 1, 2**64, 10**30]},
        ["9223372036854775808", "-9223372036854775809", "18446744073709551616", "1" + "0" * 30],
        ["9223372036854775807", "-9223372036854775808", "1" + "0" * 29]),
    "constants within values": ({"const": {"a": [2**63]}}, ['{"a":[9223372036854775808]}'],
        ['{"a":[9223372036854775807]}', '{"a":[]}']),
    "a decimal of many digits": ({"const": 0.12345678901234568}, ["0.12345678901234568"],
        ["0.12345678901234567", "0.1234567890123457"]),
    "from 2^53 on": ({**INTEGER, "minimum": 2**53 + 1}, ["9007199254740993", "1" + "0" * 40],
        ["9007199254740992", "0", "-9007199254740993"]),
    "above 2^53": ({**INTEGER, "exclusiveMinimum": 2**53 + 1}, ["9007199254740994"],
        ["9007199254740993"]),
    "all of 64 bits": ({**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1},
        ["-9223372036854775808", "9223372036854775807", "0", "-1"],
        ["-9223372036854775809", "9223372036854775808", "-0.5"]),
    "no less than -2^63": ({**INTEGER, "minimum": -(2**63)},
        ["-9223372036854775808", "0", "9223372036854775808"], ["-9223372036854775809"]),
    "unsigned": ({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, ["18446744073709551615", "0"],
        ["18446744073709551616", "-1"]),
    "one value of a range": ({**INTEGER, "minimum": 2**70, "maximum": 2**70},
        [str(2**70)], [str(2**70 + 1), str(2**70 - 1)]),
    "a range of numbers": ({**NUMBER, "minimum": 0, "maximum": 9007199254740993.0},
        ["0", "0.5", "9007199254740992"], ["-0.5", "9007199254740993.5"]),
    "an end that is out": ({**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        ["0.5", "0.001"], ["0", "1", "0.0", "1.0"]),
    "a range below a thousandth": ({**NUMBER, "minimum": 0.1234567890123456789, "maximum": 1},
        ["0.2", "1"], ["0.12", "1.0000000001"]),
    "several texts of one": ({**INTEGER, "minimum": 2**53, "maximum": 2**53 + 2, "multipleOf": 1},
        ["9007199254740992", "9007199254740994"], ["9007199254740991", "9007199254740995"]),
}  # fmt: skip
WHERE = {
    "itself": (lambda schema: schema, "{}"),
    "in a property": (
        lambda schema: {"type": "object", "properties": {"n": schema}, "required": ["n"]},
        '{{"n":{}}}',
    ),
    "in a list": (lambda schema: {"type": "array", "items": schema, "minItems": 1}, "[{}]"),
    "by a reference": (lambda schema: {"$ref": "#/$defs/n", "$defs": {"n": schema}}, "{}"),
    "in an alternative": (lambda schema: {"anyOf": [{"type": "null"}, schema]}, "{}"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_keep_their_digits(judge, name):
    given, valid, invalid = NUMBERS[name]
    for around, text in WHERE.values():
        form = judge.libraries.compile(source_of(StructuredOutputsParams(json=around(given))))
        assert [each for each in valid if not judge.allows(form, text.format(each))] == []
        assert [each for each in invalid if judge.allows(form, text.format(each))] == []
        assert form.unenforced == ()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({**NUMBER, "multipleOf": 1e-9, "minimum": 2**60}, "bounds of so many digits"),
        ({"type": "object", "patternProperties": {"^a": {"const": 2**60}}}, "so many digits"),
        ({"type": "object", "properties": {"a": {"const": 2**60}}, "minProperties": 1},
         "so many digits"),
    ],
)  # fmt: skip
def test_numbers_that_would_be_others_are_refused(judge, given, reason):
    with pytest.raises(GrammarError, match=reason):
        judge.libraries.compile(source_of(StructuredOutputsParams(json=given)))


NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}}
OPENED = {
    "no others": (NAME, False),
    "others": ({**NAME, "additionalProperties": True}, False),
    "others by the option": (NAME, True),
    "others of a kind": ({**NAME, "additionalProperties": {"type": "integer"}}, False),
    "others by patterns": ({**NAME, "patternProperties": {"^x": {"type": "integer"}}}, False),
    "others that nothing evaluates": ({**NAME, "unevaluatedProperties": {"type": "null"}}, False),
    "others next to a long number": (
        {**NAME, "additionalProperties": {"type": "integer", "minimum": 2**60}},
        False,
    ),
}
NOT_AGAIN = (
    '{"name":"a","name":"b"}',
    '{"name":"a","n\\u0061me":1}',
    '{"name":"a","n\\u0061me":"b"}',
    '{"n\\u0061me":1}',
    '{"\\u006eame":1,"name":"a"}',
    '{"\\u006Eame":null}',
)


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("text", NOT_AGAIN)
def test_a_declared_key_comes_once_and_in_one_spelling(judge, name, text):
    """An extra key is not a declared one, however it is spelled."""
    given, is_open = OPENED[name]
    asked = StructuredOutputsParams(json=given, allow_additional_properties=is_open)
    form = judge.libraries.compile(source_of(asked))
    assert judge.allows(form, '{"name":"a"}')
    assert not judge.allows(form, text)


def test_what_is_open_takes_others(judge):
    extra = {
        "others": '{"name":"a","more":[1]}',
        "others by the option": '{"more":[1],"x":{}}',
        "others of a kind": '{"name":"a","names":5}',
        "others by patterns": '{"name":"a","xn":5}',
        "others that nothing evaluates": '{"nam":null}',
        "others next to a long number": '{"name":"a","b":1152921504606846976}',
    }
    for name, (given, is_open) in OPENED.items():
        asked = StructuredOutputsParams(json=given, allow_additional_properties=is_open)
        form = judge.libraries.compile(source_of(asked))
        for other, text in extra.items():
            assert judge.allows(form, text) or name != other
        assert name != "no others" or not any(judge.allows(form, t) for t in extra.values())


MOOT = {
    "one that is declared": {
        "type": "object",
        "properties": {"abc": {"type": "integer"}},
        "patternProperties": {"^abc$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "all that are declared": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "patternProperties": {"^[ab]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "some that are declared": {
        "type": "object",
        "properties": {"x1": {"type": "boolean"}, "y": {"type": "boolean"}},
        "patternProperties": {"^x[12]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "nothing follows": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "patternProperties": {"^b": False, "^c": {"not": {}}},
        "additionalProperties": False,
    },
    "within a list": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "type": "object",
            "properties": {"k": {"type": "null"}},
            "patternProperties": {"^k$": {"type": ["null", "string"]}},
            "additionalProperties": False,
        },
    },
    "a part that nothing follows": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": False}},
        "additionalProperties": {"allOf": [{"type": "string"}, {"type": "null"}]},
    },
}


@pytest.mark.parametrize("name", MOOT)
def test_no_text_comes_to_where_nothing_may_follow(judge, name):
    """The patterns of names that are declared led into keys that could not be ended."""
    found = judge.verdict(MOOT[name], is_open=True, num_walks=40)
    assert found.kind == "exact", found


@pytest.mark.parametrize(
    ("given", "pointer", "reason"),
    [
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "#", "no value"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "#", "no value follows"),
        ({"properties": {"a/b": {"contains": {}}}}, "#/properties/a~1b", "contains is not supp"),
        ({"properties": {"a": {"minimum": "1"}}}, "#/properties/a/minimum", "a number"),
        ({"properties": {"a": {"pattern": "(?=b)"}}}, "#/properties/a", "is not supported"),
        ({"dependentSchemas": {"a": {"contains": {}}}}, "#/dependentSchemas/a", "contains is not"),
        ({"anyOf": [{"items": {"contains": {}}}, {"if": {}, "then": {}}]}, "#/anyOf/0/items",
         "contains is not"),
        ({"$ref": "https://a.example/b.json"}, "#/$ref", "nothing is fetched"),
        ({"if": {"properties": {"a": True}}, "unevaluatedProperties": False}, "#", "a condition"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "#", "anyOf allows that"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(given, pointer, reason):
    with pytest.raises(SchemaError, match=reason) as caught:
        prepared(given)
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    ("given", "pointers"),
    [
        ({"type": "string", "format": "date"}, []),
        ({"type": "string", "format": "moment"}, ["#/format"]),
        ({"type": "array", "uniqueItems": True}, ["#/uniqueItems"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "object", "properties": {"format": {"const": "moment"}}}, []),
        ({"const": {"format": "moment", "uniqueItems": True}}, []),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"format": "int32"}}},
         ["#/$defs/x/format"]),
        ({"$defs": {"unused": {"format": "int32"}}, "type": "null"}, []),
        ({"type": "string", "colour": "red"}, ["#/colour"]),
        ({"anyOf": [{"type": "null"}, {"items": {"contains": {}}}]}, ["#/anyOf/1"]),
        ({"properties": {"a": {"anyOf": [{"if": {}, "then": {}}, {"$ref": "#/$defs/x"}]}},
          "$defs": {"x": {"type": "null"}}}, ["#/properties/a/anyOf/0"]),
        ({"oneOf": [{"type": "null"}, {"type": "array", "items": {"contains": {}}}]},
         ["#/oneOf/1"]),
        ({"anyOf": [{"type": "null"}, {"contains": {}}, {"type": "object"}],
          "unevaluatedProperties": False}, ["#/anyOf/1"]),
        ({"$schema": "https://a.example/dialect", "type": "null"}, ["#/$schema"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}, []),
        ({"type": "string", "title": "T", "default": 1, "x-a": 1, "examples": [1]}, []),
    ],
)  # fmt: skip
def test_annotations_are_named(given, pointers):
    assert list(prepared(given).unenforced) == pointers


def test_structural_tags_enforce_schemas_alike(judge):
    schema = {"type": "object", "properties": {"n": {"const": 2**63 + 1}}, "required": ["n"]}
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": {
            "type": "json_schema", "json_schema": schema}, "end": "</a>"},
    }  # fmt: skip
    asked = StructuredOutputsParams(structural_tag=json.dumps(tag))
    form = judge.libraries.compile(source_of(asked))
    assert judge.allows(form, '<a>{"n":9223372036854775809}</a>')
    assert not judge.allows(form, '<a>{"n":9223372036854775808}</a>')
    assert not judge.allows(form, '<a>{"n":9223372036854775809,"m":1}</a>')


def test_what_alternatives_say_together_is_evaluated(judge):
    """A value may follow several of an `anyOf`, and has the properties of them all."""
    given = {
        "type": "object",
        "anyOf": [
            {"properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
            {"properties": {"c": {"type": "null"}}, "required": ["c"]},
        ],
        "unevaluatedProperties": False,
    }
    form = judge.libraries.compile(source_of(StructuredOutputsParams(json=given)))
    for text in ('{"a":null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}'):
        assert judge.allows(form, text)
    for text in ("{}", '{"d":null}', '{"a":null,"d":null}', '{"a":1,"b":null}'):
        assert not judge.allows(form, text)
