"""Values in arguments: Python's literals against Python, JSON's end against Python's json."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.output_parsing import TOOL_PARSERS, ArgumentText, plan_parsers, whole
from quire.server.output_parsing.delimiters import Delimiters
from quire.server.output_parsing.ends import End
from quire.server.output_parsing.formats.json_value import JsonValue
from quire.server.output_parsing.formats.parameter_formats import PARAMETER_FORMATS
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
     "'\\ud83d'", "00", "01.5", "1e05", "'a' 'b'", "['a'\n\"b\"]", "'a''b'", "['a' 'b', 'c']",
     "r'\\n\\''", "u'ß'", "R\"a\" 'b'", "(1)", "('a' 'b')", "((1), (2,),)", "[(), (((3)))]",
     "{'a': ('b')}", "'''it's'''", "'a' ''"],
)  # fmt: skip
def test_literals_that_json_has_not(text):
    with warnings.catch_warnings(action="ignore"):  # Python warns of "\\q"
        expected = ast.literal_eval(text)
    assert translated(text) == json.loads(json.dumps(expected)), text


@pytest.mark.parametrize(
    "text",
    ["x", "1 + 2", "f(1)", "[1 2]", "[,]", "{,: 1}", "1__0", "--1", "nan", "", "'a' + 'b'", "'a' 1",
     "'a' * 2", "'%s' % 1", "[1}", "(1]", "1, 2", "{1: 2, 3}", "{1, 2: 3}", "'a", "rb'a", "(,)"],
)  # fmt: skip
def test_anything_but_a_literal_is_not_a_value(text):
    assert python_as_json(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("007", 7),
        ("-010", -10),
        ("{1, 2}", [1, 2]),
        ("{'a'}", ["a"]),
        ("[{1: {2}}]", [{"1": [2]}]),
        ("b'x\\x41'", "xA"),
        ("'it's'", "it's"),
        ("'it's here', ", None),
        ('"say "hi" now"', 'say "hi" now'),
        ('"say "hi""', 'say "hi"'),
        ("['the dogs' bone', 'b']", ["the dogs' bone", "b"]),
        ("{'a': 'don't', 'b': 1}", {"a": "don't", "b": 1}),
        ("'rub r'", "rub r"),
        ("'a' r", None),
        ("'g(b='c'))'", "g(b='c'))"),
        ("{'a': 'h['k']]', 'b': 'x'}", {"a": "h['k']]", "b": "x"}),
        ("'python -c \"f(x='\\\\,'))\"'", "python -c \"f(x='\\,'))\""),
    ],
)
def test_what_was_meant_is_read(text, value):
    if value is None:
        assert python_as_json(text) is None
    else:
        assert translated(text) == value
        [call] = plan_parsers("pythonic").read(f"[f(a={text}, b=[{text}])]", tools=[]).tool_calls
        assert json.loads(call.arguments) == {"a": value, "b": [value]}


def test_a_call_begins_when_its_first_argument_has_been_read():
    plan = plan_parsers("pythonic")
    for output in ("[f(a=g(1), b=2)]", "[f(a=", "[f(a='x' + y)]", "[f(a='x"):
        said = plan.read(output, tools=[])
        assert (said.content, said.tool_calls) == (output, ()), output
    said = plan.read("[f(a=1, b=c)]", tools=[])
    assert [call.arguments for call in said.tool_calls] == ['{"a": 1']
    assert said.content == " b=c)]"


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


OF_ALL = {
    "qwen3_coder": "<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter '
    'name="{key}" string="true">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "minicpm5": '<function name="f"><param name="{key}">{value}</param></function>',
    "glm45": "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("parser", OF_ALL)
@pytest.mark.parametrize(
    ("key", "value", "arguments"),
    [
        ("arguments", '{"count": 1, "text": "a"}', {"count": 1, "text": "a"}),
        ("input", ' { "text" : "}" } ', {"text": "}"}),
        ("parameters", "{}", {}),
        ("properties", "{'text': 'a'}", {"text": "a"}),
        ("arguments", '{"other": 1}', {"arguments": '{"other": 1}'}),
        ("arguments", '["count"]', {"arguments": '["count"]'}),
        ("arguments", "count: 1", {"arguments": "count: 1"}),
        ("text", '{"count": 1}', {"text": '{"count": 1}'}),
    ],
)
def test_an_object_of_all_arguments_is_not_one_of_them(parser, key, value, arguments):
    """Models put what they were asked for into one argument that the tool does not have."""
    own = {"text": {"type": "string"}, "count": {"type": "integer"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": own}}}]
    output = OF_ALL[parser].replace("{key}", key).replace("{value}", value)
    [call] = plan_parsers(parser).read(output, tools=tools).tool_calls
    if TOOL_PARSERS[parser].checks_calls:  # which leaves out what the tool does not have
        arguments = {name: each for name, each in arguments.items() if name in own}
    assert json.loads(call.arguments) == arguments
    reader = plan_parsers(parser).open(tools=tools)
    events = [event for char in output for event in reader.feed(char)]
    [streamed] = whole([*events, *reader.finish()]).tool_calls
    assert streamed.arguments == call.arguments


def test_an_argument_of_the_tool_is_not_opened_whatever_its_name():
    own = {"input": {"type": "object"}, "text": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": own}}}]
    output = OF_ALL["qwen3_coder"].replace("{key}", "input").replace("{value}", '{"text": "a"}')
    [call] = plan_parsers("qwen3_coder").read(output, tools=tools).tool_calls
    assert json.loads(call.arguments) == {"input": {"text": "a"}}


def test_arguments_that_follow_an_object_of_all_of_them_are_kept():
    own = {"count": {"type": "integer"}, "text": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": own}}}]
    output = (
        "<function=f>\n<parameter=input>\n{}\n</parameter>\n<parameter=text>\na\n</parameter>\n"
    )
    for value in ('{"count": 1}', "{}"):
        parser = plan_parsers("qwen3_coder")
        [call] = parser.read(output.format(value) + "</function>", tools=tools).tool_calls
        assert json.loads(call.arguments) == json.loads(value) | {"text": "a"}


@given(text=TEXT, types=st.frozensets(st.sampled_from(["integer", "number", "array", "boolean"])))
def test_any_text_becomes_json(text, types):
    json.loads(typed_json(text, types | {"string"}, is_padded=True))


MARKS = st.sampled_from(
    ["</parameter>", "<parameter=a>", "</function>", "</tool_call>", "</arg_value>", "</param>",
     "</｜DSML｜parameter>", "<|close|>argument<|sep|>", "]<]minimax[>[</b>", "<|", "<![CDATA[",
     "</steptml:parameter>", "</atem:parameter>", "}", '"', "\n", " ", "a"]
)  # fmt: skip
WITH_MARKS = st.lists(MARKS | TEXT, max_size=6).map("".join)
INVOKED = '<{0}invoke name="f">\n<{0}parameter name="text"{1}>{{}}</{0}parameter>\n</{0}invoke>\n'
PAIR = "<{0}arg_key{1}>text</{0}arg_key{1}>\n<{0}arg_value{1}>{{}}</{0}arg_value{1}>\n"
AS_TEXT = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "mimo": "<tool_call>\n<function=f>\n<parameter=text>{}</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=text>{}</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minimax_m2": f"<minimax:tool_call>\n{INVOKED.format('', '')}</minimax:tool_call>",
    "dots": f"<dots_function_call>\n{INVOKED.format('', '')}</dots_function_call>",
    "deepseek_v32": "<｜DSML｜function_calls>\n"
    + INVOKED.format("｜DSML｜", ' string="true"')
    + "</｜DSML｜function_calls>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    + INVOKED.format("steptml:", "")
    + "<｜tool_call_end｜><｜tool_calls_end｜>",
    "muse_glimmer": " to=f<|message|><atem:function_calls>\n"
    + INVOKED.format("atem:", "")
    + "</atem:function_calls><|eot|>",
    "minicpm5": '<function name="f"><param name="text"><![CDATA[{}]]></param></function>',
    "glm45": f"<tool_call>f\n{PAIR.format('', '')}</tool_call>",
    "hy_v3": f"<tool_calls>\n<tool_call>f<tool_sep>\n{PAIR.format('', '')}</tool_call>\n"
    "</tool_calls>",
    "k2_horizon": f"<ifm|tool_calls>\n<ifm|tool_call>f\n{PAIR.format('ifm|', '')}</ifm|tool_call>\n"
    "</ifm|tool_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument '
    'key="text" type="string"<|sep|>{}<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<text>{}'
    "]<]minimax[>[</text>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "gemma4": '<|tool_call>call:f{text:<|"|>{}<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{text:<escape>{}<escape>}<end_function_call>",
}
TAG_AFTER = re.compile(
    r"<parameter=|"
    r"(</[^<>]*(parameter|param|function|arg_value)>|<\|close\|>argument<\|sep\|>)\s*(<|]<|$)"
)
"""A text in which a value seems to end."""


def test_every_format_of_written_parameters_is_tried():
    tried = {TOOL_PARSERS[name].name for name in AS_TEXT}
    assert {made.name for made in PARAMETER_FORMATS} - tried == {
        *("deepseek_v4", "deepseek_v41", "hy_v4"),  # other marks of formats that are tried
    }


@pytest.mark.parametrize("parser", AS_TEXT)
@given(text=WITH_MARKS, data=st.data())
def test_a_text_argument_is_kept_to_the_letter(parser, text, data):
    if TAG_AFTER.search(text) or text.startswith("<![CDATA["):
        return
    output = AS_TEXT[parser].replace("{}", text)
    tools = [{"function": {"name": "f", "parameters": {"properties": SCHEMA}}}]
    place = "start" if parser == "muse_glimmer" else None
    reader = plan_parsers(parser).open(place, tools=tools)
    at = data.draw(st.integers(0, len(output)))
    events = [event for piece in (output[:at], output[at:]) for event in reader.feed(piece)]
    [call] = whole([*events, *reader.finish()]).tool_calls
    assert json.loads(call.arguments) == {"text": text}


@pytest.mark.parametrize(
    ("parser", "output"),
    [
        ("kimi_k2",
         "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|> <|tool_call_end|>"),
        ("deepseek_v31",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>"),
        ("openai", "<|channel|>commentary to=functions.f<|message|><|call|>"),
        ("glm45", "<tool_call>f</tool_call>"),
        ("gemma4", "<|tool_call>call:f{ }<tool_call|>"),
        ("minimax_m3",
         ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[</invoke>'),
    ],
)  # fmt: skip
def test_no_arguments_are_an_empty_object(parser, output):
    place = "start" if parser == "openai" else None
    for pieces in ([output], list(output)):
        reader = plan_parsers(parser).open(place, tools=[])
        events = [event for piece in pieces for event in reader.feed(piece)]
        [call] = whole([*events, *reader.finish()]).tool_calls
        assert json.loads(call.arguments) == {}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("<parameter=text>\na </parameter> b\n</parameter>\n</function>",
         {"text": "a </parameter> b"}),
        ("<parameter=text>\na\n<parameter=count>\n2\n</parameter>\n</function>",
         {"text": "a", "count": 2}),
        ("<parameter=text>\n\n a\n\n\n</parameter>\n</function>", {"text": "\n a\n\n"}),
        ("<parameter=text>a\n</parameter></function>", {"text": "a\n"}),
        ("<parameter=text></parameter></function>", {"text": ""}),
        ("<parameter=text>\n\n</parameter></function>", {"text": ""}),
        ("<parameter=text>\n print('</function>')\n</parameter>\n</function>\n</tool_call>",
         {"text": " print('</function>')"}),
        ("<parameter=text>\na\n</function>\n</tool_call>", {"text": "a"}),
    ],
)  # fmt: skip
def test_where_a_value_ends(written, arguments):
    tools = [{"function": {"name": "f", "parameters": {"properties": SCHEMA}}}]
    [call] = plan_parsers("qwen3_coder").read(f"<function=f>\n{written}", tools=tools).tool_calls
    assert json.loads(call.arguments) == arguments


def test_what_may_end_a_value_is_decided_in_bounded_time():
    reader = plan_parsers("qwen3_coder").open(tools=[])
    reader.feed("<function=f>\n<parameter=text>\na</parameter>")
    held = [event for _ in range(300) for event in reader.feed(" ")]
    assert held == [ArgumentText(0, '"')]


@pytest.mark.parametrize("parser", ["hermes", "deepseek_v31"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"{\\"a\\": \\"\\\\n\\\\\\"\\"}"', '{"a": "\\n\\""}'),
        ('" \\n{\\"a\\": 1}"', '{"a": 1}'),
        ('"text"', '"text"'),
        ('""', '""'),
        ('"\\u007b}"', '"\\u007b}"'),
        ('{"a": "{}"}', '{"a": "{}"}'),
        (f'"{" " * 500}x"', f'"{" " * 500}x"'),
    ],
)
def test_arguments_in_a_string_of_json_are_decoded_once(parser, written, arguments):
    output = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>',
        "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{written}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }[parser]
    for pieces in ([output], list(output)):
        reader = plan_parsers(parser).open(tools=[])
        events = [event for piece in pieces for event in reader.feed(piece)]
        [call] = whole([*events, *reader.finish()]).tool_calls
        assert call.arguments == arguments


@pytest.mark.parametrize(
    ("name", "kind"),
    [("int64", "integer"), ("unsigned int", "integer"), ("float32", "number"), ("Bool", "boolean"),
     ("varchar(20)", "string"), ("list[str]", "array"), ("dict[str, int]", "object"),
     ("longtext", "string"), ("none", "null"), ("weekday", None), ("", None)],
)  # fmt: skip
def test_types_of_other_systems(name, kind):
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": name}}}}
    assert ToolSchemas([tool]).types("f", "a") == ({kind} if kind else set())
