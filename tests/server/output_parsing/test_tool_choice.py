"""What the tools of a request and its choice among them mean."""

from __future__ import annotations

import json

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire import embedded
from quire.errors import InvalidParameter, NotBuiltYet
from quire.grammar.lowering import lowered
from quire.grammar.source import source_of
from quire.params import StructuredOutputsParams
from quire.server.output_parsing import ToolUse, decide_tool_use, plan_parsers
from tests.server.output_parsing.golden_transcripts import TOOLS

HERMES = plan_parsers("hermes")
NO_PARSER = plan_parsers()
NAMED = {"type": "function", "function": {"name": "weather"}}


def make_tool(name: str, **parameters: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_no_tools_no_choice():
    for tools in (None, []):
        assert decide_tool_use(tools, None, HERMES) == ToolUse()
        assert decide_tool_use(tools, "none", HERMES) == ToolUse()
        assert decide_tool_use(tools, "auto", NO_PARSER) == ToolUse()
        for choice in ("required", NAMED, allowed("auto", NAMED)):
            with pytest.raises(InvalidParameter, match="tool_choice=.* it goes with tools only"):
                decide_tool_use(tools, choice, HERMES)


def test_none_shows_the_tools_and_reads_no_calls():
    use = decide_tool_use(TOOLS, "none", NO_PARSER)
    assert (use.tools, use.in_prompt, use.schema) == (None, tuple(TOOLS), None)
    assert decide_tool_use(TOOLS, "none", NO_PARSER, hides_unused=True).in_prompt is None


def test_auto_leaves_the_model_free_and_needs_a_format():
    use = decide_tool_use(TOOLS, None, HERMES, max_calls=1)
    assert use == decide_tool_use(TOOLS, "auto", HERMES, max_calls=1)
    assert (use.tools, use.forced, use.max_calls, use.schema) == (tuple(TOOLS), False, 1, None)
    for choice in (None, "auto"):
        with pytest.raises(InvalidParameter, match="--tool-call-parser"):
            decide_tool_use(TOOLS, choice, NO_PARSER)


def test_a_named_tool_forces_its_arguments():
    use = decide_tool_use(TOOLS, NAMED, NO_PARSER)
    assert (use.forced, use.is_named) == ("weather", True)
    assert use.schema == TOOLS[0]["function"]["parameters"]
    flat = {"type": "function", "name": "now"}
    assert decide_tool_use(TOOLS, flat, NO_PARSER).schema == {"type": "object", "properties": {}}


@pytest.mark.parametrize("choice", ["any", 3, {"type": "function"}, {"function": {"name": 1}}, []])
def test_another_choice_is_refused(choice):
    with pytest.raises(InvalidParameter, match="it must be none, auto, required or one function"):
        decide_tool_use(TOOLS, choice, HERMES)


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize("is_flat", [False, True])
def test_allowed_tools_are_all_that_is_shown_and_called(is_flat):
    choice = allowed("auto", NAMED)
    if is_flat:
        choice = {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        }
    use = decide_tool_use(TOOLS, choice, HERMES)
    assert use == decide_tool_use(TOOLS[:1], "auto", HERMES)
    target = choice if is_flat else choice["allowed_tools"]
    target["mode"] = "required"
    use = decide_tool_use(TOOLS, choice, NO_PARSER)
    assert use == decide_tool_use(TOOLS[:1], "required", NO_PARSER)
    assert not use.is_named


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": []},
        allowed("none", NAMED),
        allowed(None, NAMED),
        allowed("auto"),
        {"type": "allowed_tools", "mode": "auto", "tools": "weather"},
    ],
)
def test_allowed_tools_need_a_mode_and_names(choice):
    with pytest.raises(InvalidParameter, match="needs a mode, auto or required"):
        decide_tool_use(TOOLS, choice, HERMES)
    with pytest.raises(InvalidParameter, match="the tools are weather, now"):
        decide_tool_use(TOOLS, allowed("auto", {"type": "function", "name": "clock"}), HERMES)


def test_a_tool_that_is_not_there_is_refused_with_those_that_are():
    choice = {"type": "function", "function": {"name": "clock"}}
    with pytest.raises(InvalidParameter, match="tool_choice='clock'.*the tools are weather, now"):
        decide_tool_use(TOOLS, choice, HERMES)


def test_the_channels_of_gpt_oss_without_their_tool_format_cannot_be_forced():
    plan = plan_parsers(None, "openai_gptoss")
    for choice in ("required", NAMED):
        with pytest.raises(NotBuiltYet, match="--tool-call-parser openai"):
            decide_tool_use(TOOLS, choice, plan)


GPT_OSS = plan_parsers("openai", "openai_gptoss")
THOUGHT = "<|channel|>analysis<|message|>hm\n{}<|end|><|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


def with_control_tokens(*names):
    """The embedded tokenizer with `<|name|>` for each of the names."""
    library = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    library.add_special_tokens([f"<|{name}|>" for name in names])
    return library


def is_allowed_by(grammar, tokenizer, output, end):
    """Whether the grammar, in the library's notation, lets the output be written."""
    library = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(end))
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(output, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids)


@pytest.fixture(scope="module")
def tokenizer():
    """The embedded one with the control tokens of gpt-oss."""
    return with_control_tokens("channel", "message", "start", "end", "constrain", "call")


@pytest.mark.parametrize(
    ("output", "is_allowed"),
    [
        (THOUGHT + TO_WEATHER + '{"city": "Bonn", "days": 2}', True),
        (TO_WEATHER + "{}", True),
        (TO_WEATHER + '{"days": "two"}', False),
        (TO_WEATHER + '{"days": 2, "more": 1}', False),
        (THOUGHT + THOUGHT + "<|channel|>commentary to=functions.now <|constrain|>json", True),
        (TO_WEATHER.replace("weather", "clock"), False),
        ("<|channel|>final<|message|>", False),
    ],
)
def test_a_forced_call_of_gpt_oss_is_written_in_its_own_form(tokenizer, output, is_allowed):
    use = decide_tool_use(TOOLS, "required", GPT_OSS)
    assert (use.forced, use.is_named, use.schema) == (False, False, None)
    grammar = lark_of_calls(tokenizer, use)
    assert is_allowed_by(grammar, tokenizer, output, "<|call|>") is is_allowed
    if is_allowed and output.endswith("}"):
        [call] = GPT_OSS.read(output, tools=use.tools).tool_calls
        assert call.name == "weather" and json.loads(call.arguments) in (
            {"city": "Bonn", "days": 2},
            {},
        )


def lark_of_calls(tokenizer, use, plan=GPT_OSS, place="start"):
    tag = plan.whole_output(place, use.calls)
    source = source_of(StructuredOutputsParams(structural_tag=tag))
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return lowered(source, special).text


INKLING = plan_parsers("inkling", "inkling")
MODEL, THINKING, INVOKE, ENDED = (
    "<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|end_message|>",
)  # fmt: skip
INKLING_BONN = '{"name":"weather","args":{"city": "Bonn", "days": 2}}'


@pytest.fixture(scope="module")
def inkling_tokenizer():
    """The embedded one with the control tokens of Inkling."""
    return with_control_tokens(
        "message_model", "content_thinking", "content_invoke_tool_json", "content_text",
        "end_message", "content_model_end_sampling",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "output", "is_allowed"),
    [
        (MODEL, INVOKE + INKLING_BONN, True),
        ("", MODEL + INVOKE + INKLING_BONN, True),
        ("", f"{MODEL}{THINKING}hm\n{ENDED}{MODEL}{INVOKE}{INKLING_BONN}", True),
        (MODEL + THINKING, f"hm{ENDED}{MODEL}{INVOKE}{INKLING_BONN}", True),
        (MODEL + THINKING, INVOKE + INKLING_BONN, False),
        (MODEL, INVOKE + '{"name":"weather","args":{"days": "two"}}', False),
        (MODEL, INVOKE + '{"name":"clock","args":{}}', False),
        (MODEL, "<|content_text|>", False),
        (MODEL, f"{THINKING}hm{ENDED}{MODEL}<|content_text|>", False),
    ],
)
def test_a_forced_call_of_inkling_is_written_in_its_own_form(
    inkling_tokenizer, prompt, output, is_allowed
):
    use = decide_tool_use(TOOLS, "required", INKLING)
    place = INKLING.place(prompt)
    grammar = lark_of_calls(inkling_tokenizer, use, INKLING, place)
    end = "<|content_model_end_sampling|>"
    assert is_allowed_by(grammar, inkling_tokenizer, output, end) is is_allowed
    if is_allowed:
        found = INKLING.read(output + ENDED, place, tools=use.tools)
        assert [(call.name, call.arguments) for call in found.tool_calls] == [
            ("weather", '{"city": "Bonn", "days": 2}')
        ]
        assert not found.content


def test_an_answer_of_inkling_in_a_form_has_its_header(inkling_tokenizer):
    form = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = INKLING.whole_output("start", [INKLING.answer_format(form)])
    special = [token.content for token in inkling_tokenizer.get_added_tokens_decoder().values()]
    grammar = lowered(source_of(StructuredOutputsParams(structural_tag=tag)), special).text
    outputs = {f"{MODEL}<|content_text|>12": True, f"{MODEL}<|content_text|>a": False, "12": False}
    for output, is_allowed in outputs.items():
        assert is_allowed_by(grammar, inkling_tokenizer, output, ENDED) is is_allowed, output


MUSE = plan_parsers("muse_glimmer", "muse_glimmer")
MUSE_HEAD = " to=weather<|message|><atem:function_calls>\n" + '<atem:invoke name="weather">\n'
MUSE_CITY = '<atem:parameter name="city">Bonn &lt;</atem:parameter>\n'
MUSE_DAYS = '<atem:parameter name="days">2</atem:parameter>\n'
MUSE_TAIL = "</atem:invoke>\n</atem:function_calls>"
MUSE_THOUGHT, MUSE_NEXT = " to=self<|message|>hm<|eom|>", "<|start|>assistant"


@pytest.fixture(scope="module")
def muse_tokenizer():
    """The embedded one with the control tokens of Muse Glimmer."""
    return with_control_tokens("message", "eom", "eot", "start")


@pytest.mark.parametrize(
    ("prompt", "output", "is_allowed"),
    [
        (MUSE_NEXT, MUSE_HEAD + MUSE_CITY + MUSE_DAYS + MUSE_TAIL, True),
        (MUSE_NEXT, MUSE_THOUGHT + MUSE_NEXT + MUSE_HEAD + MUSE_CITY + MUSE_DAYS + MUSE_TAIL, True),
        (
            f"{MUSE_NEXT} to=self<|message|>",
            f"hm<|eom|>{MUSE_NEXT}{MUSE_HEAD}{MUSE_CITY}{MUSE_DAYS}{MUSE_TAIL}",
            True,
        ),
        (MUSE_NEXT, MUSE_HEAD + MUSE_DAYS + MUSE_CITY, False),
        (MUSE_NEXT, MUSE_HEAD + MUSE_DAYS.replace("2", "two"), False),
        (MUSE_NEXT, MUSE_HEAD + '<atem:parameter name="mood">', False),
        (MUSE_NEXT, " to=clock<|message|>", False),
        (MUSE_NEXT, " to=user<|message|>", False),
        (MUSE_NEXT, f"{MUSE_THOUGHT}{MUSE_NEXT} to=user<|message|>", False),
    ],
)
def test_a_forced_call_of_muse_glimmer_is_written_in_its_own_form(
    muse_tokenizer, prompt, output, is_allowed
):
    use = decide_tool_use(TOOLS, "required", MUSE)
    place = MUSE.place(prompt)
    grammar = lark_of_calls(muse_tokenizer, use, MUSE, place)
    assert is_allowed_by(grammar, muse_tokenizer, output, "<|eot|>") is is_allowed
    if is_allowed:
        found = MUSE.read(f"{output}<|eot|>", place, tools=use.tools)
        assert [(call.name, call.arguments) for call in found.tool_calls] == [
            ("weather", '{"city": "Bonn &lt;", "days": 2}')
        ]
        assert not found.content


def test_an_answer_of_muse_glimmer_in_a_form_has_its_header(muse_tokenizer):
    form = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = MUSE.whole_output("start", [MUSE.answer_format(form)])
    special = [token.content for token in muse_tokenizer.get_added_tokens_decoder().values()]
    grammar = lowered(source_of(StructuredOutputsParams(structural_tag=tag)), special).text
    outputs = {
        " to=user<|message|>12": True,
        f"{MUSE_THOUGHT}{MUSE_NEXT} to=user<|message|>12": True,
        " to=user<|message|>a": False,
        "12": False,
    }
    for output, is_allowed in outputs.items():
        assert is_allowed_by(grammar, muse_tokenizer, output, "<|eot|>") is is_allowed, output


def test_strings_of_an_enum_and_optional_arguments_of_a_forced_call(muse_tokenizer):
    properties = {"unit": {"enum": ["C", "F"]}, "on": {"type": "boolean"}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    use = decide_tool_use([{"type": "function", "function": tool}], "required", MUSE)
    grammar = lark_of_calls(muse_tokenizer, use, MUSE, "start")
    head = " to=f<|message|><atem:function_calls>\n" + '<atem:invoke name="f">\n'
    unit = '<atem:parameter name="unit">{}</atem:parameter>\n'
    outputs = {
        head + unit.format("C") + MUSE_TAIL: True,
        head + '<atem:parameter name="on">true</atem:parameter>\n' + MUSE_TAIL: True,
        head + MUSE_TAIL: True,
        head + unit.format("K"): False,
    }
    for output, is_allowed in outputs.items():
        assert is_allowed_by(grammar, muse_tokenizer, output, "<|eot|>") is is_allowed, output


def test_a_named_call_of_gpt_oss_is_of_that_tool():
    use = decide_tool_use(TOOLS, NAMED, GPT_OSS)
    assert use.is_named
    assert "functions.weather " in str(use.calls) and "functions.now " not in str(use.calls)


@pytest.mark.parametrize(
    ("tool", "complaint"),
    [
        ("f", r"tools\[1\].type='f'"),
        ({"type": "code_interpreter"}, r"tools\[1\].type='code_interpreter'.*\"function\""),
        ({"type": "function"}, r"tools\[1\].function=None"),
        ({"type": "function", "function": {}}, r"tools\[1\].function.name=None"),
        ({"type": "function", "function": {"name": " "}}, r"tools\[1\].function.name=' '"),
        ({"type": "function", "function": {"name": "a" * 513}}, "1 to 512 characters"),
        (make_tool("f", type="string"), r"tools\[1\].function.parameters=.*type \"object\""),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "JSON schema"),
        (make_tool("weather"), "tools='weather'.*a name of its own"),
    ],
)
def test_a_tool_that_is_not_right_is_refused_by_its_place(tool, complaint):
    with pytest.raises(InvalidParameter, match=complaint):
        decide_tool_use([TOOLS[0], tool], "auto", HERMES)


def test_too_many_tools_are_refused():
    tools = [make_tool(f"f{number}") for number in range(513)]
    with pytest.raises(InvalidParameter, match="at most 512"):
        decide_tool_use(tools, "auto", HERMES)


TREE = make_tool(
    "grow",
    type="object",
    properties={
        "tree": {"$ref": "#/$defs/tree"},
        "self": {"$ref": "#"},
        "kept": {"const": {"$ref": "#/data"}},
    },
    additionalProperties=False,
    **{
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaves": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "additionalProperties": False,
            }
        }
    },
)
OTHER = make_tool(
    "count",
    properties={"n": {"$ref": "#/$defs/tree"}},
    required=["n"],
    **{"$defs": {"tree": {"type": "integer"}}},
)


@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        ([{"name": "count", "parameters": {"n": 3}}], True),
        ([{"name": "count", "parameters": {"n": {}}}], False),
        ([{"name": "count", "parameters": {}}], False),
        ([{"name": "count", "parameters": []}], False),
        ([{"name": "grow", "parameters": {"tree": {"leaves": [{"leaves": []}]}}}], True),
        ([{"name": "grow", "parameters": {"tree": {"leaves": [3]}}}], False),
        ([{"name": "grow", "parameters": {"self": {"tree": {}}}}], True),
        ([{"name": "grow", "parameters": {"self": {"n": 3}}}], False),
        ([{"name": "grow", "parameters": {"kept": {"$ref": "#/data"}}}], True),
        ([{"name": "grow", "parameters": {}}, {"name": "count", "parameters": {"n": 1}}], True),
        ([{"name": "shrink", "parameters": {}}], False),
        ([{"name": "grow"}], False),
        ([], False),
        ({"name": "grow", "parameters": {}}, False),
    ],
)
def test_required_calls_follow_each_tool_s_own_schema(answer, is_valid):
    schema = decide_tool_use([TREE, OTHER], "required", NO_PARSER).schema
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(answer) is is_valid


def test_without_parallel_calls_one_is_all():
    schema = decide_tool_use([OTHER], "required", NO_PARSER, max_calls=1).schema
    one = {"name": "count", "parameters": {"n": 3}}
    assert jsonschema.Draft202012Validator(schema).is_valid([one])
    assert not jsonschema.Draft202012Validator(schema).is_valid([one, one])


def test_the_grammars_can_be_compiled():
    for choice in ("required", {"type": "function", "name": "weather"}):
        schema = json.dumps(decide_tool_use([*TOOLS, OTHER], choice, NO_PARSER).schema)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        assert llguidance.LLMatcher.validate_grammar(grammar) == ""


@settings(max_examples=50)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["weather", "now"]),
            st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    indent=st.sampled_from([None, 1]),
)
def test_what_the_grammar_of_required_calls_allows_is_read_as_calls(calls, indent):
    use = decide_tool_use(TOOLS, "required", NO_PARSER)
    answer = [{"name": name, "parameters": arguments} for name, arguments in calls]
    output = json.dumps(answer, indent=indent)
    said = NO_PARSER.read(output, tools=use.tools, forced=use.forced)
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == calls
    assert said.content is None
