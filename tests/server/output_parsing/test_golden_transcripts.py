"""Every format reads what its models write, in one piece and in every way of cutting it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.output_parsing import (
    ArgumentText,
    CallStarted,
    Event,
    OutputParser,
    ParsedOutput,
    ParserPlan,
    plan_parsers,
    whole,
)
from tests.server.output_parsing.golden_transcripts import GOLDENS, TOOLS, Golden

each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)


def make_plan(golden: Golden) -> ParserPlan:
    return plan_parsers(golden.tools, golden.reasoning)


def open_reader(golden: Golden, plan: ParserPlan) -> OutputParser:
    return plan.open(
        plan.place(golden.prompt), tools=TOOLS, call_id=lambda name, index: f"id-{index}"
    )


def read(reader: OutputParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in reader.feed(piece)]
    return [*events, *reader.finish()]


def said(transcript: ParsedOutput) -> tuple:
    calls = tuple((call.name, call.arguments) for call in transcript.tool_calls)
    return transcript.reasoning, transcript.content, calls


@each_golden
def test_an_output_means_what_its_model_meant(golden: Golden):
    plan = make_plan(golden)
    transcript = whole(read(open_reader(golden, plan), [golden.output]))
    assert said(transcript) == (golden.thought, golden.content, golden.calls)


@each_golden
def test_every_cut_in_two_and_single_characters_say_the_same(golden: Golden):
    plan = make_plan(golden)
    expected = whole(read(open_reader(golden, plan), [golden.output]))
    text = golden.output
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in [*cuts, list(text)]:
        events = read(open_reader(golden, plan), pieces)
        assert whole(events) == expected, pieces
        assert all(event.text for event in events if not isinstance(event, CallStarted))


@settings(max_examples=150)
@given(golden=st.sampled_from(GOLDENS), data=st.data())
def test_any_chunking_says_the_same(golden: Golden, data: st.DataObject):
    plan = make_plan(golden)
    text = golden.output
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = whole(read(open_reader(golden, plan), [text]))
    assert whole(read(open_reader(golden, plan), pieces)) == expected


@each_golden
def test_what_was_said_of_a_truncated_output_was_said_for_good(golden: Golden):
    """Each shorter output begins as the longer ones do: a call's name and arguments only grow."""
    plan = make_plan(golden)
    text = golden.output
    for size in range(len(text)):
        reader = open_reader(golden, plan)
        early = reader.feed(text[:size])
        final = whole([*early, *reader.feed(text[size:]), *reader.finish()])
        cut = whole(early)
        assert (final.reasoning or "").startswith(cut.reasoning or "")
        assert (final.content or "").startswith(cut.content or "")
        for call, full in zip(cut.tool_calls, final.tool_calls, strict=False):
            assert call.name == full.name and full.arguments.startswith(call.arguments)
        whole(read(open_reader(golden, plan), [text[:size]]))  # and it can end anywhere


@each_golden
def test_complete_calls_are_json(golden: Golden):
    for _, arguments in golden.calls:
        if "cut" not in golden.name:
            assert isinstance(json.loads(arguments), dict)


@each_golden
def test_arguments_follow_their_call(golden: Golden):
    plan = make_plan(golden)
    started = -1
    for event in read(open_reader(golden, plan), list(golden.output)):
        if isinstance(event, CallStarted):
            assert event.index == started + 1
            started = event.index
        elif isinstance(event, ArgumentText):
            assert event.index == started
