"""Formats whose calls are held until they are known to be valid."""

from __future__ import annotations

import pytest

from quire.server.output_parsing import ParsedOutput, plan_parsers, whole

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
]
OPEN, CLOSE = '<function name="weather">', "</function>"
CITY, DAY = '<param name="city">Bonn</param>', '<param name="day">May 1</param>'


def read(output: str, **options: int) -> ParsedOutput:
    """The output, which says the same in one piece and in single characters."""
    found = []
    for pieces in ([output], list(output)):
        parser = plan_parsers("minicpm5").open(tools=TOOLS, call_id=lambda name, i: "", **options)
        events = [event for piece in pieces for event in parser.feed(piece)]
        found.append(whole([*events, *parser.finish()]))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "output",
    [
        f"Hm. {OPEN}{CITY}",
        f"{OPEN}{DAY}{CLOSE}\n",
        f"{OPEN}{CITY}{CITY}{CLOSE}",
        f"{OPEN}<param>Bonn</param>{CITY}{CLOSE} Yes.",
        f'{OPEN}<param name="City">Bonn</param>{CLOSE}',
        f'{OPEN}<param name="properties">{{"town": "Bonn"}}</param>{CLOSE}',
        f'{OPEN}{DAY}<function name="other">{CITY}{CLOSE}',
    ],
    ids=["cut", "missing", "twice", "unnamed", "letters", "wrapped", "inner"],
)
def test_a_call_that_its_tool_would_refuse_is_text_as_it_was_written(output):
    parsed = read(output)
    assert (parsed.content, parsed.tool_calls) == (output, ())


def test_a_call_without_an_end_is_text_after_one_that_has_it():
    parsed = read(f"{OPEN}{CITY}{CLOSE}\n{OPEN}{CITY}")
    assert parsed.content == f"\n{OPEN}{CITY}" and len(parsed.tool_calls) == 1


def test_arguments_that_the_tool_does_not_have_are_left_out():
    [call] = read(f'{OPEN}{CITY}<param name="mood">good</param>{CLOSE}').tool_calls
    assert call.arguments == '{"city": "Bonn"}'


def test_a_call_within_one_that_was_not_closed_is_a_call():
    parsed = read(f"{OPEN}{DAY}{OPEN}{CITY}{CLOSE} Yes.")
    assert parsed.content == f"{OPEN}{DAY} Yes."
    assert [call.arguments for call in parsed.tool_calls] == ['{"city": "Bonn"}']


def test_what_is_not_a_call_does_not_count_as_one():
    parsed = read(f"{OPEN}{DAY}{CLOSE}{OPEN}{CITY}{CLOSE}{OPEN}{CITY}{DAY}{CLOSE}", max_calls=1)
    assert parsed.content == f"{OPEN}{DAY}{CLOSE}"
    assert [call.arguments for call in parsed.tool_calls] == ['{"city": "Bonn"}']
