"""What transformers' own reader of responses finds in an output, ours finds too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from quire.server.output_parsing import plan_parsers
from tests.server.output_parsing.golden_transcripts import TOOLS

START = "<|im_start|>assistant\n"
TAGGED = {
    "start_anchor": START,
    "fields": {
        "reasoning": {"open": "<think>", "close": "</think>"},
        "content": {"repeats": True, "join": ""},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"function": "{content}"},
        },
    },
}
PARAMETERS = {
    "start_anchor": START,
    "fields": {
        "reasoning": {"open": "<think>", "close": "</think>"},
        "content": {"repeats": True, "join": ""},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>"), max_size=9)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
PROSE = st.sampled_from(["", "Well. ", "Ich prüfe das:\n"])
THOUGHTS = st.sampled_from(["", "<think>\nhm, 3 < 4\n</think>\n\n"])


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["weather", "now"]), st.dictionaries(WORDS, VALUES, max_size=3)),
        max_size=3,
    ),
    thought=THOUGHTS,
    prose=PROSE,
    escapes=st.booleans(),
)
def test_tagged_json(calls, thought, prose, escapes):
    written = "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escapes)
        + "\n</tool_call>"
        for name, arguments in calls
    )
    check("hermes", TAGGED, f"{thought}{prose}{written}")


@settings(max_examples=60)
@given(
    texts=st.dictionaries(st.sampled_from(["city", "other"]), WORDS.map(str.strip), max_size=2),
    days=st.integers() | st.none(),
    exact=st.booleans(),
    thought=THOUGHTS,
    prose=PROSE,
)
def test_tagged_parameters(texts, days, exact, thought, prose):
    arguments = {**texts, "exact": json.dumps(exact)}
    if days is not None:
        arguments["days"] = str(days)
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    written = f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
    check("qwen3_coder", PARAMETERS, f"{thought}{prose}{written}")


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_no_calls(parser):
    template = TAGGED if parser == "hermes" else PARAMETERS
    check(parser, template, "Just words.")


def check(parser: str, template: dict, output: str) -> None:
    theirs = parse_response(output, template, prefix=START, tools=TOOLS)
    plan = plan_parsers(parser, "qwen3")
    ours = plan.read(output, plan.place(START), tools=TOOLS)
    assert (ours.reasoning or "").strip() == theirs.get("reasoning", "")
    assert (ours.content or "").strip() == theirs.get("content", "").strip()
    found = [
        {"function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in ours.tool_calls
    ]
    assert found == theirs.get("tool_calls", [])
