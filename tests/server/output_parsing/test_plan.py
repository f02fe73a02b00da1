"""What is decided for a server and for a request: names, where an output begins, forced calls."""

from __future__ import annotations

import pytest

from quire.errors import InvalidParameter
from quire.server.output_parsing import (
    ParserPlan,
    ParserState,
    Reads,
    ReasoningFormat,
    ToolFormat,
    plan_parsers,
    whole,
)
from quire.server.output_parsing.parser_plan import FormStart
from tests.server.output_parsing.golden_transcripts import TOOLS


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(InvalidParameter) as caught:
        plan_parsers("hermse")
    assert "tool_call_parser='hermse' is not allowed: it must be auto, none or one of " in str(
        caught.value
    )
    assert ", hermes, " in str(caught.value)
    with pytest.raises(InvalidParameter, match="reasoning_parser='r1'.*deepseek_r1"):
        plan_parsers("hermes", "r1")


def test_formats_of_whole_outputs_go_with_each_other_only():
    with pytest.raises(InvalidParameter, match="do not go together"):
        plan_parsers("hermes", "openai_gptoss")
    with pytest.raises(InvalidParameter, match="do not go together"):
        plan_parsers("openai", "qwen3")


OPTIONAL = FormStart(("<think>",), ("</think>",))
OPEN = FormStart((), ("</think>",))


@pytest.mark.parametrize(
    ("parser", "prompt", "inside", "start"),
    [
        ("qwen3", "<|im_start|>assistant\n", False, OPTIONAL),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True, OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, None),
        ("qwen3", "say <think> please<|im_start|>assistant\n", False, OPTIONAL),
        ("qwen3", "say </think> please<|im_start|>assistant\n", False, OPTIONAL),
        ("deepseek_r1", "<｜Assistant｜>", True, OPTIONAL),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True, OPEN),
        ("deepseek_r1", "<｜Assistant｜></think>", False, None),
        (
            "granite",
            "assistant:",
            False,
            FormStart(
                ("Here is my thought process:", "Here's my thought process:"),
                ("Here is my response:", "Here's my response:"),
            ),
        ),
        ("openai_gptoss", "<|start|>assistant", False, None),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True, None),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", False, None),
    ],
)
def test_the_prompt_says_where_an_output_begins(parser, prompt, inside, start):
    plan = plan_parsers(None, parser)
    place = plan.place(prompt)
    assert (place in ("again", "assumed", "reasoning")) is inside
    assert plan.form_start(place) == start
    if inside:
        assert plan.read("hm", place).reasoning == "hm"


@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("<think>hm", None, "hm"),
        ("<think>hm</think>", None, "hm"),
        ("<think>hm</thi", None, "hm</thi"),
        ("<think>hm</think>\n\n", "hm", None),
        ("<think>hm</think>\nYes.", "hm", "Yes."),
        ("Yes.", None, "Yes."),
        ("", None, None),
    ],
)
def test_a_reasoning_that_no_answer_follows_is_the_answer_for_who_asks(output, reasoning, content):
    plan = plan_parsers("hermes", "granite_thinking_parser")
    parsed = plan.read(output, tools=None, fills_answer=True)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    parser = plan.open(tools=None, fills_answer=True)
    events = [event for char in output for event in parser.feed(char)]
    streamed = whole([*events, *parser.finish()])
    assert streamed.content == content
    assert streamed.reasoning == (content if parser.is_filled else reasoning)
    call = '<think>hm</think><tool_call>{"name": "now"}</tool_call>'
    assert plan.read(call, tools=TOOLS, fills_answer=True).content is None


def test_with_a_form_a_reasoning_is_not_assumed():
    """An answer without one is read as an answer, and with one it is read as before."""
    plan = plan_parsers(None, "deepseek_r1")
    place = plan.place_of_form(plan.place("<｜Assistant｜>"))
    assert plan.read("{}", place).content == "{}"
    said = plan.read("<think>hm</think>{}", place)
    assert (said.reasoning, said.content) == ("hm", "{}")
    opened = plan.place("<｜Assistant｜><think>")
    assert plan.place_of_form(opened) == opened


@pytest.mark.parametrize(
    ("continued", "inside"), [("<think>so", True), ("<think>so</think>Ye", False), ("Ye", False)]
)
def test_a_message_that_goes_on_says_it_too(continued, inside):
    plan = plan_parsers(None, "qwen3")
    place = plan.place("<|im_start|>assistant\n" + continued, continued)
    assert (place in ("again", "reasoning")) is inside
    said = plan.read("s", place)
    assert (said.reasoning, said.content) == (("s", None) if inside else (None, "s"))


def test_required_calls_are_a_list_of_names_and_parameters():
    plan = plan_parsers("hermes", "qwen3")
    output = '<think>a</think>[{"name": "now", "parameters": {"a": 1}}, {"name": "now"}]'
    said = plan.read(output, tools=TOOLS, forced=True)
    assert [(c.name, c.arguments) for c in said.tool_calls] == [("now", '{"a": 1}'), ("now", "{}")]
    assert (said.reasoning, said.content) == ("a", None)


def test_a_named_call_is_its_arguments():
    plan = plan_parsers(None, "qwen3")
    said = plan.read('<think>a</think>\n{"city": "Bonn"}', tools=TOOLS, forced="weather")
    assert [(c.name, c.arguments) for c in said.tool_calls] == [("weather", '{"city": "Bonn"}')]
    assert (said.reasoning, said.content) == ("a", None)


def test_a_table_that_cannot_be_read_says_why():
    with pytest.raises(ValueError, match="needs a state 'content'"):
        ToolFormat("x", {})
    with pytest.raises(ValueError, match=r"leads to \['call'\]"):
        ToolFormat("x", {"content": ParserState(Reads.CONTENT, {"<c>": "call"})})
    with pytest.raises(ValueError, match="ends by itself"):
        call = ParserState(Reads.ENVELOPE)
        ToolFormat("x", {"content": ParserState(Reads.CONTENT, {"<c>": "call"}), "call": call})
    with pytest.raises(ValueError, match="lies within"):
        ToolFormat("x", {"content": ParserState(Reads.CONTENT, {"<c>": "content", "c": "content"})})
    with pytest.raises(ValueError, match="its start and its end"):
        ReasoningFormat("x", ("<t>",))


def test_the_worked_example_of_the_table_s_page():
    states = {
        "content": ParserState(Reads.CONTENT, {"CALL ": "name"}),
        "name": ParserState(Reads.HEAD, {" ": "key", "END": "done"}, kept={"END"}),
        "key": ParserState(Reads.KEY, {": ": "value"}),
        "value": ParserState(Reads.VALUE, {" END": "done", "; ": "key"}),
        "done": ParserState(Reads.CONTENT, {"END": "content"}, closes=True),
    }
    plan = ParserPlan(ToolFormat("spoken", states))
    said = plan.read("CALL weather city: Bonn; days: 2 END ok", tools=TOOLS)
    assert [(c.name, c.arguments) for c in said.tool_calls] == [
        ("weather", '{"city": "Bonn", "days": 2}')
    ]
    assert said.content == " ok"


def test_without_reasoning_the_answer_starts_at_once():
    plan = plan_parsers("hermes")
    assert plan.form_start(plan.place("<|im_start|>assistant\n<think>\n")) is None


@pytest.mark.parametrize("reasoning", ["qwen3", "granite", "minimax_m3"])
def test_a_reasoning_that_ends_without_having_begun_is_not_text(reasoning):
    plan = plan_parsers(None, reasoning)
    [end, *_] = plan.reasoning.ends
    for prompt in ("", "no reasoning"):
        said = plan.read(f"\n{end}Fine.", plan.place(prompt))
        assert (said.reasoning, said.content) == (None, "Fine.")
    assert plan.read(f"So: {end}Fine.").content == f"So: {end}Fine."


@pytest.mark.parametrize("tools", [None, "hermes", "pythonic", "llama3_json"])
def test_the_tags_of_an_answer_are_not_text_with_any_tool_format(tools):
    plan = plan_parsers(tools, "hunyuan_a13b")
    output = "<think>\nHm.\n</think>\n<answer>\nFine.\n</answer>"
    said = plan.read(output, tools=None if tools is None else [])
    assert (said.reasoning, said.content) == ("Hm.", "Fine.")
    answer = plan.read("\n<answer>\nFine.\n</answer>", plan.place("</think>"), tools=[])
    assert (answer.reasoning, answer.content) == (None, "Fine.")
    assert plan.read("Fine.", plan.place("</think>"), tools=[]).content == "Fine."
