"""Outputs that no model should write: nothing raises, nothing is lost, little is held back."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.output_parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ArgumentText,
    ParserPlan,
    plan_parsers,
    whole,
)
from quire.server.output_parsing.formats.message_formats import MUSE_GLIMMER
from quire.server.output_parsing.formats.parameter_formats import PARAMETER_FORMATS
from tests.server.output_parsing.golden import WHOLE_OUTPUTS
from tests.server.output_parsing.golden_transcripts import GOLDENS, TOOLS

PAIRS = [
    (tools, WHOLE_OUTPUTS.get(tools, reasoning))
    for tools in TOOL_PARSERS
    for reasoning in ("qwen3", "deepseek_r1", None)
]
PLANS = {pair: plan_parsers(*pair) for pair in PAIRS}
SCRAPS = [
    *'"{}[](),:=;\\\n ',
    '{"name": "weather", "arguments": {"city": "',
    '{"name": "now"}',
    "weather(city=",
    "weather",
    "```json",
    "😀",
    "\ud83d",
    "é\u2028",
    "True",
    "1e9",
    " to=functions.weather",
]


@st.composite
def soups(draw: st.DrawFn) -> tuple[ParserPlan, str, list[str]]:
    """A plan and text made of its own delimiters, scraps of calls and words that occur once."""
    pair = draw(st.sampled_from(PAIRS))
    plan = PLANS[pair]
    delimiters = sorted(plan.delimiters())
    kinds = draw(st.lists(st.integers(0, 2), max_size=14))
    words = [f"w{number}q" for number in range(len(kinds))]
    pieces = [
        draw(st.sampled_from((delimiters, SCRAPS, [word])[kind]))
        for kind, word in zip(kinds, words, strict=True)
    ]
    return plan, "".join(pieces), words


def numbered(name: str, index: int) -> str:
    return f"id-{index}"


@settings(max_examples=250)
@given(soup=soups(), data=st.data())
def test_any_soup_reads_the_same_however_it_is_cut(soup, data):
    plan, text, _ = soup
    place = data.draw(st.sampled_from([plan.place(""), plan.place("<think>"), "content"]))
    options = {
        "tools": TOOLS,
        "call_id": numbered,
        "max_calls": data.draw(st.sampled_from([None, 1, 2])),
    }
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    reader, events = plan.open(place, **options), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += reader.feed(text[start:end])
    assert whole([*events, *reader.finish()]) == plan.read(text, place, **options)


@settings(max_examples=200)
@given(soup=soups())
def test_no_word_is_lost(soup):
    """A word is somewhere in the transcript. Of gpt-oss, headers are markup and may have words."""
    plan, text, words = soup
    if plan.writes_forced_calls_itself:
        return
    said = plan.read(text, tools=TOOLS)
    calls = " ".join(call.name + call.id + call.arguments for call in said.tool_calls)
    everything = f"{said.reasoning} {said.content} {calls}"
    unseen = [word for word in words if word in text and word not in everything]
    # A key of a call that is neither its name nor its arguments is dropped with its value, and so
    # is noise between the marks of a section and of its first call.
    dropped = r'[{{,]\s*"[^"]*{}|section_begin\|>(?:(?!_begin).)*{}.*call_begin'
    unseen = [word for word in unseen if not re.search(dropped.format(word, word), text, re.DOTALL)]
    assert not unseen


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
def test_text_without_marks_flows_at_once(parser):
    plan = plan_parsers(parser, WHOLE_OUTPUTS.get(parser))
    reader = plan.open("content", tools=TOOLS)
    if TOOL_PARSERS[parser].trims_answer:  # blanks wait for what follows them
        assert whole(reader.feed("A word. ")).content == "A word."
        pieces = [("Grüße 😀", " Grüße 😀"), (" 3 > 2", " 3 > 2"), ("\n\n* a", "\n\n* a")]
    else:
        assert whole(reader.feed("A word. ")).content == "A word. "
        # A generic call may begin at a line's start, so a line's end waits for more.
        line_break = " \n\n " if parser == "generic" else "\n\n"
        pieces = [(text, text) for text in ("Grüße 😀", " 3 > 2", line_break, "* a")]
    for piece, said in pieces:
        assert whole(reader.feed(piece)).content == said
    assert reader.finish() == []


PYTHON_FORMATS = ("lfm2", "llama4_pythonic", "olmo3", "pythonic")
"""An argument of theirs is passed on when it is complete."""
TEXT_FORMATS = {made.name for made in (*PARAMETER_FORMATS, MUSE_GLIMMER)}
"""Text is text there, without escapes."""
by_format = {
    golden.tools: golden
    for golden in reversed(GOLDENS)
    if golden.calls and golden.calls[0][1].startswith('{"city": "Bonn"')
}


HELD_FORMATS = (*PYTHON_FORMATS, *(n for n, made in TOOL_PARSERS.items() if made.checks_calls))
streaming = [golden for name, golden in by_format.items() if name not in HELD_FORMATS]


@pytest.mark.parametrize("golden", streaming, ids=lambda golden: golden.tools)
def test_huge_arguments_flow_piece_by_piece(golden):
    """A string of 400,000 characters: each piece is passed on when it comes, none is kept."""
    start, end = golden.output.split("Bonn", 1)
    plan = plan_parsers(golden.tools, golden.reasoning)
    reader = plan.open(plan.place(golden.prompt), tools=TOOLS)
    before = whole(reader.feed(start)).tool_calls[0].arguments
    piece, num_pieces = "<a b=1> [x] {y} 😀, ", 20_000
    written: list[str] = []
    for number in range(num_pieces):
        texts = [event.text for event in reader.feed(piece) if isinstance(event, ArgumentText)]
        written += texts
        assert len("".join(texts)) >= len(piece) - 1, number
    after = [
        event.text
        for event in [*reader.feed(end), *reader.finish()]
        if isinstance(event, ArgumentText) and event.index == 0
    ]
    assert json.loads(before + "".join(written + after))["city"] == piece * num_pieces


@pytest.mark.parametrize("golden", by_format.values(), ids=lambda golden: golden.tools)
@pytest.mark.parametrize("value", ['\\" } ] ) {', "\\\\", "\\u00e9\\n", "😀", ""])
def test_strings_keep_their_brackets_and_escapes(golden, value):
    if TOOL_PARSERS[golden.tools].name in TEXT_FORMATS:
        text, expected = value, value  # no escapes there: text is text
    else:
        text, expected = value, json.loads(f'"{value}"')
    plan = plan_parsers(golden.tools, golden.reasoning)
    output = golden.output.replace("Bonn", text)
    call = plan.read(output, plan.place(golden.prompt), tools=TOOLS).tool_calls[0]
    assert json.loads(call.arguments)["city"] == expected


def test_deeply_nested_arguments_do_not_recurse():
    depth = 50_000
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    hermes = plan_parsers("hermes")
    output = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert hermes.read(output, tools=TOOLS).tool_calls[0].arguments == arguments
    pythonic = plan_parsers("pythonic")
    output = f"[now(a={'[' * depth}{']' * depth})]"
    assert pythonic.read(output, tools=TOOLS).content == output
    qwen = plan_parsers("qwen3_coder")
    output = f"<function=weather><parameter=spots>{'[' * depth}</parameter></function>"
    value = json.loads(qwen.read(output, tools=TOOLS).tool_calls[0].arguments)["spots"]
    assert value == "[" * depth


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
def test_a_name_without_end_is_let_go(parser):
    """Text that only begins like a call is held back for as long as a name can be, not longer."""
    plan = plan_parsers(parser, WHOLE_OUTPUTS.get(parser))
    for delimiter in sorted(plan.delimiters()):
        reader = plan.open(plan.place(""), tools=TOOLS)
        events = [event for _ in range(300) for event in reader.feed(delimiter + "abcdefgh")]
        said = whole(events)
        assert said.content or said.reasoning or said.tool_calls, delimiter


def test_later_calls_are_left_out():
    plan = plan_parsers("hermes")
    one = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    for most in (1, 2):
        said = plan.read(one * 3, tools=TOOLS, max_calls=most)
        assert [call.name for call in said.tool_calls] == ["weather"] * most
        assert said.content is None


def test_without_tools_in_the_request_markup_is_text():
    plan = plan_parsers("hermes", "qwen3")
    output = '<think>a</think><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    said = plan.read(output)
    assert said.tool_calls == ()
    assert said.content == '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def test_special_tokens_are_kept_where_a_format_needs_them():
    special = ["<|im_end|>", "<tool_call>", "[TOOL_CALLS]", "<|channel|>"]
    assert plan_parsers("mistral").needs_special_tokens(special)
    assert plan_parsers("openai", "openai_gptoss").needs_special_tokens(special)
    assert plan_parsers("hermes").needs_special_tokens(special)
    assert not plan_parsers("hermes").needs_special_tokens(special, reads_calls=False)
    assert plan_parsers("gemma4").needs_special_tokens(['<|"|>'])
    assert plan_parsers("minimax_m3").needs_special_tokens(["]<]minimax[>["])
    assert not plan_parsers("hermes").needs_special_tokens(["<|im_end|>"])
    assert not plan_parsers("pythonic").needs_special_tokens(special)


def test_names_of_all_parsers_make_a_plan():
    for name in TOOL_PARSERS:
        assert plan_parsers(name, WHOLE_OUTPUTS.get(name))
    for name in REASONING_PARSERS:
        assert plan_parsers(None, name)
