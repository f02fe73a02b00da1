"""What a form is taken for: fields, engine options, and the value that is compiled."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.structured_outputs_config import (
    StructuredOutputsConfig,
    structured_outputs_config,
)
from quire.errors import InvalidParameter, NotBuiltYet
from quire.grammar.regular import PatternError, narrowed, one_of
from quire.grammar.source import source_of, with_defaults
from quire.params import StructuredOutputsParams as Form


def deep(depth):
    value = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"json": "{"}, "structured_outputs.json='{' is not allowed: it must be JSON"),
        ({"json": "[1]"}, "it must be a JSON object"),
        ({"json": deep(70)}, "it may be nested at most 64 levels deep"),
        ({"json": {"const": {1, 2}}}, "it must be plain JSON data"),
        ({"regex": "a" * (2**20 + 1)}, "it may have at most 1048576 characters"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "it goes with json, json_object, structural_tag",
        ),
        ({"json": {}, "whitespace_pattern": ""}, "Set disable_any_whitespace instead"),
        ({"regex": "a", "starts_after": []}, "1 to 64 characters or token ids"),
        ({"regex": "a", "starts_after": "x" * 65}, "1 to 64 characters or token ids"),
        ({"regex": "a", "disable_any_whitespace": 1}, "it must be True or False"),
    ],
)
def test_fields_that_cannot_be(fields, text):
    with pytest.raises(InvalidParameter, match=re.escape(text)):
        Form(**fields)


def test_a_schema_at_the_limit_of_depth_is_taken():
    assert Form(json=deep(63)).kind == "json"


def test_equal_forms_are_one_source_and_others_are_not():
    forms = [
        Form(json={"type": "object"}),
        Form(json={"type": "object"}, disable_any_whitespace=True),
        Form(json={"type": "object"}, whitespace_pattern=" "),
        Form(regex="a"),
        Form(choice=["a"]),
        Form(choice=["a", "b"]),
        Form(grammar='start: "a"'),
    ]
    digests = [source_of(form).digest for form in forms]
    assert len(set(digests)) == len(forms)
    assert source_of(Form(json_object=True)).text == source_of(forms[0]).text.replace(" ", "")
    assert source_of(Form(regex="a", starts_after="x")).digest == digests[3]


def test_engine_options_reach_every_form():
    config = structured_outputs_config(
        {"disable_any_whitespace": True, "disable_additional_properties": True}
    )
    form = with_defaults(Form(json={"items": {"type": "object"}}), config)
    source = source_of(form)
    assert source.whitespace == ""
    assert source.openness == "shut"
    own = with_defaults(Form(json={}, allow_additional_properties=False), config)
    assert source_of(own).openness == "shut"
    own = with_defaults(Form(json={}, allow_additional_properties=True), config)
    assert source_of(own).openness == "open"
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}
    source = source_of(with_defaults(Form(structural_tag=json.dumps(tag)), config))
    assert (source.whitespace, source.openness) == ("", "shut")
    opened = structured_outputs_config({"allow_additional_properties": True})
    for fields, openness in (
        ({}, "open"),
        ({"allow_additional_properties": False}, "closed"),
        ({"disable_additional_properties": True}, "shut"),
    ):
        assert source_of(with_defaults(Form(json={}, **fields), opened)).openness == openness
    own = with_defaults(Form(json={}, whitespace_pattern=" "), config)
    assert source_of(own).whitespace == " "
    reasoning = StructuredOutputsConfig(enable_in_reasoning=True)
    assert with_defaults(Form(regex="a", starts_after="x"), reasoning).starts_after is None


@pytest.mark.parametrize(
    ("given_config", "error", "text"),
    [
        ({"backend": "outlines"}, NotBuiltYet, "Use 'guidance'"),
        ({"backend": "mine"}, InvalidParameter, "the backends are auto, guidance, xgrammar"),
        ({"reasoning_parser_plugin": "a.py"}, NotBuiltYet, "Register the format"),
        ({"compile_time_s": 0}, InvalidParameter, "limits must be above 0"),
        ({"colour": 1}, InvalidParameter, "its fields are backend"),
        (
            {"disable_additional_properties": True, "allow_additional_properties": True},
            InvalidParameter,
            "goes without disable_additional_properties",
        ),
    ],
)
def test_engine_options_that_cannot_be(given_config, error, text):
    with pytest.raises(error, match=text):
        structured_outputs_config(given_config)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.text(max_size=6))
def test_a_choice_matches_its_texts_only(texts, other):
    pattern = one_of(texts)
    for text in texts:
        assert re.fullmatch(pattern, text)
    assert bool(re.fullmatch(pattern, other)) == (other in texts)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\d-]\\d", r"[[0-9]-]\\d"),
        (r"\w\.\n", r"[0-9A-Za-z_]\.\n"),
        (r"[[:alpha:]]&~[", r"[\[:alpha:]]&~["),
        (r"[]a[]x[^]&&\d]~", r"[]a\[]x[^]\&\&[0-9]]~"),
    ],
)
def test_classes_are_narrowed_and_escapes_kept(pattern, expected):
    assert narrowed(pattern) == expected


def test_an_escape_has_a_character():
    assert narrowed(r"a\\") == r"a\\"
    for pattern in ("\\", "a\\", "a\\\\\\"):
        with pytest.raises(PatternError, match="middle of an escape"):
            narrowed(pattern)
