"""Values in arguments: Python's literals against Python, JSON's end against Python's json."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.output_parsing import plan_parsers, whole
from quire.server.output_parsing.delimiters import Delimiters
from quire.server.output_parsing.ends import End
from quire.server.output_parsing.formats.json_value import JsonValue
from quire.server.output_parsing.formats.parameters_as_text import typed_json
from quire.server.output_parsing.formats.python_literal import MAX_LITERAL_CHARS, python_as_json
from quire.server.output_parsing.tool_schemas import ToolSchemas

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
SCALARS = SCALARS.filter(lambda value: value not in (float("inf"), float("-inf")))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def translated(text: str) -> Any:
    """The literal as decoded JSON."""
    written = python_as_json(text)
    assert written is not None
    return json.loads(written)


@given(value=VALUES)
def test_a_literal_that_python_writes_means_the_same(value):
    assert translated(repr(value)) == json.loads(json.dumps(value))


@given(value=VALUES)
def test_a_literal_in_a_call_that_comes_in_single_characters_means_the_same(value):
    parser = plan_parsers("pythonic").open(tools=[])
    output = f"[f(a={value!r}, b=[{value!r}])]"
    events = [event for char in output for event in parser.feed(char)]
    [call] = whole([*events, *parser.finish()]).tool_calls
    expected = json.loads(json.dumps(value))
    assert json.loads(call.arguments) == {"a": expected, "b": [expected]}


@pytest.mark.parametrize(
    "text",
    ["'''a'b\n\"c\"'''", '""" x """', "''", "'\\x41\\101\\u00e9\\U0001F600'", "'\\q\\\n'", "+1",
     "1_000", ".5", "5.", "-0x1F", "0b101", "1e5", "(1,)", "()", "[1,]", "{'a': 1,}", "-0.0",
     "'\\ud83d'"],
)  # fmt: skip
def test_literals_that_json_has_not(text):
    with warnings.catch_warnings(action="ignore"):  # Python warns of "\\q"
        expected = ast.literal_eval(text)
    assert translated(text) == json.loads(json.dumps(expected)), text


@pytest.mark.parametrize(
    "text",
    ["x", "1 + 2", "{1, 2}", "b'x'", "f(1)", "[1 2]", "{'a'}", "01", "[,]", "{,: 1}", "'a' 'b'",
     "1__0", "--1", "nan", ""],
)  # fmt: skip
def test_what_is_no_literal_is_no_value(text):
    assert python_as_json(text) is None


def test_a_literal_is_bounded():
    assert python_as_json("[" * 10_000 + "]" * 10_000) is None
    assert python_as_json(repr("a" * MAX_LITERAL_CHARS)) is None


@settings(max_examples=200)
@given(value=VALUES, indent=st.sampled_from([None, 1]), data=st.data())
def test_a_json_value_ends_where_json_says(value, indent, data):
    text = json.dumps(value, indent=indent, ensure_ascii=data.draw(st.booleans()))
    behind = data.draw(st.sampled_from([" ", "\n}", "]", ", 1", "}"]))
    reader = JsonValue(Delimiters(["</end>"]))
    position = 0
    for size in range(1, len(text + behind) + 1):
        position, end = reader.read((text + behind)[:size], position)
        if end is End.DONE:
            break
    assert (end, position) == (End.DONE, len(text))


SCHEMA = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "dict": {"type": "object"},
    "maybe": {"type": ["integer", "null"]},
    "any": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    "choice": {"enum": ["a", 1]},
    "self": {"$ref": "#/properties/self"},
    "broken": {"type": 3, "enum": 5, "anyOf": "x", "$ref": "#/no/where"},
}
SCHEMAS = ToolSchemas([{"function": {"name": "f", "parameters": {"properties": SCHEMA}}}])


@pytest.mark.parametrize(
    ("argument", "written", "value"),
    [
        ("text", "12", "12"),
        ("count", "12", 12),
        ("count", "1.0", 1.0),
        ("count", "twelve", "twelve"),
        ("count", "9" * 6000, "9" * 6000),
        ("size", "1e3", 1000.0),
        ("size", "NaN", "NaN"),
        ("flag", "TRUE", True),
        ("flag", "1", "1"),
        ("list", "['a']", ["a"]),
        ("list", '["a"', '["a"'),
        ("dict", '{"a": 1}', {"a": 1}),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "a", "a"),
        ("choice", "a", "a"),
        ("choice", "1", 1),
        ("self", "1", "1"),
        ("broken", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_text_becomes_the_type_of_the_schema(argument, written, value):
    output = f"<function=f>\n<parameter={argument}>\n{written}\n</parameter>\n</function>"
    tools = [{"function": {"name": "f", "parameters": {"properties": SCHEMA}}}]
    [call] = plan_parsers("qwen3_coder").read(output, tools=tools).tool_calls
    if argument == "count" and len(written) > 5000:
        assert call.arguments == f'{{"{argument}": {written}}}'  # a number that Python refuses
    else:
        assert json.loads(call.arguments) == {argument: value}


@given(text=TEXT, types=st.frozensets(st.sampled_from(["integer", "number", "array", "boolean"])))
def test_any_text_becomes_json(text, types):
    json.loads(typed_json(text, types | {"string"}, is_padded=True))


@given(text=TEXT)
def test_a_text_argument_is_kept_to_the_letter(text):
    if "</parameter>" in text or "<parameter=" in text or "</function>" in text:
        return
    output = f"<function=f>\n<parameter=text>\n{text}\n</parameter>\n</function>"
    tools = [{"function": {"name": "f", "parameters": {"properties": SCHEMA}}}]
    [call] = plan_parsers("qwen3_coder").read(output, tools=tools).tool_calls
    assert json.loads(call.arguments) == {"text": text}
