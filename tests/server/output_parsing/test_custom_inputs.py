"""Inputs of custom tools: the text that a model wrote as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.output_parsing import ArgumentText, CallStarted, ContentText, CustomInputs

SCRAPS = ["\\", "u", "d83d", "\\ude00", "\\ud83d", '"', "a", "\\n", "}", '{"input": "', "é", "😀",
          "\\u00e9", "\\x", "\\u12", " "]  # fmt: skip


def read(pieces):
    """The input of a call whose arguments come in these pieces."""
    inputs = CustomInputs(["patch"])
    events = inputs.decoded([CallStarted(0, "1", "patch")], is_last=False)
    for piece in pieces:
        events += inputs.decoded([ArgumentText(0, piece)], is_last=False)
    events += inputs.decoded([], is_last=True)
    assert all(event.text for event in events[1:])
    return "".join(event.text for event in events[1:])


@given(text=st.text(), is_ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_the_input_is_the_text_that_was_meant(text, is_ascii, indent):
    written = json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent)
    meant = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    if is_ascii:
        assert read([written]) == meant
    else:
        assert read([written]) == text


@given(scraps=st.lists(st.sampled_from(SCRAPS)), opened=st.booleans(), data=st.data())
def test_any_soup_reads_the_same_however_it_is_cut(scraps, opened, data):
    text = ('{"input": "' if opened else "") + "".join(scraps)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\', "a\\"),
        ('{"input": "\\ud83d', "\\ud83d"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\q"}', "\\q"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"text": "a"}', '{"text": "a"}'),
        ("{}", "{}"),
        ('"a"', '"a"'),
        ('{"inp', '{"inp'),
    ],
)
def test_what_is_not_as_it_should_be_stays(written, meant):
    assert read(list(written)) == meant == read([written])


def test_other_calls_and_words_pass():
    inputs = CustomInputs(["patch"])
    events = [
        ContentText("a"),
        CallStarted(0, "1", "weather"),
        ArgumentText(0, '{"input": "b"}'),
        CallStarted(1, "2", "patch"),
        ArgumentText(1, '{"inp'),
        ContentText("c"),
        CallStarted(2, "3", "patch"),
        ArgumentText(2, '{"input": "d"}'),
        CallStarted(3, "4", "weather"),
        ArgumentText(3, "{}"),
    ]
    assert inputs.decoded(events, is_last=True) == [
        *events[:7],
        ArgumentText(2, "d"),
        *events[8:],
    ]
