"""A response format together with tools that may be called: what the grammar takes."""

from __future__ import annotations

import json

import pytest

from quire import embedded
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.library import GrammarError
from quire.grammar.source import source_of
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.params import StructuredOutputsParams
from quire.server.output_parsing import TOOL_PARSERS, answer_or_calls, plan_parsers
from tests.server.output_parsing.golden_transcripts import GOLDENS, TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FORMATS = sorted({form.name for form in TOOL_PARSERS.values() if not form.has_reasoning})
CALLED = [(golden.tools, golden.output) for golden in GOLDENS if golden.calls and golden.tools]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.read(VocabularySource(str(embedded.path()), "hf", 3072))


@pytest.fixture(scope="module")
def guidance(vocabulary):
    return GrammarLibraries(vocabulary, "guidance")


def takes(guidance, tag, ids):
    form = guidance.compile(source_of(StructuredOutputsParams(structural_tag=tag)))
    matcher = form.matcher()
    try:
        matcher.consume(ids)
    except GrammarError:
        return False
    return matcher.native.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_follows_the_schema_and_calls_are_free(guidance, vocabulary, name):
    tag = answer_or_calls(SCHEMA, TOOL_PARSERS[name], TOOLS, [])
    assert takes(guidance, tag, vocabulary('{"sum": 3}'))
    for wrong in ('{"sum": "3"}', "Three.", '{"sum": 3} <tool_call>', "{"):
        assert not takes(guidance, tag, vocabulary(wrong)), wrong
    elements = json.loads(tag)["format"]["elements"]
    openings = [each["elements"][0]["value"] for each in elements if each["type"] == "sequence"]
    for output in [output for tools, output in CALLED if tools == name]:
        if starts := [output.find(opening) for opening in openings if opening in output]:
            assert takes(guidance, tag, vocabulary(output[min(starts) :])), output
    assert takes(guidance, tag, vocabulary(openings[0]))


def test_a_call_alone_follows_the_tool_s_schema(guidance, vocabulary):
    tag = answer_or_calls(SCHEMA, TOOL_PARSERS["llama3_json"], TOOLS, [])
    right = '{"name": "weather", "parameters": {"city": "Ulm", "days": 2}}'
    assert takes(guidance, tag, vocabulary(right))
    assert not takes(guidance, tag, vocabulary(right.replace("2", '"2"')))
    assert not takes(guidance, tag, vocabulary(right.replace("weather", "clock")))


def test_control_tokens_of_calls_are_tokens(guidance, vocabulary):
    """The embedded tokenizer's <|user|> (3) and <|assistant|> (4) as the tags of calls."""
    calls = plan_parsers("hermes").tool_format
    states = {
        place: type(state)(
            state.reads,
            {TAGS[text]: target for text, target in state.delimiters.items()},
            state.then,
        )
        for place, state in calls.states.items()
    }
    tag = answer_or_calls(SCHEMA, type(calls)("own", states), TOOLS, ["<|user|>", "<|assistant|>"])
    call = vocabulary('{"name": "now"}')
    assert takes(guidance, tag, [3, *call, 4])
    assert takes(guidance, tag, [3, *call, 4, 3, *call, 4])
    assert takes(guidance, tag, vocabulary('{"sum": 3}'))
    assert not takes(guidance, tag, [4, *call])
    assert not takes(guidance, tag, vocabulary("<|user|>"))


TAGS = {"<tool_call>": "<|user|>", "</tool_call>": "<|assistant|>"}


def test_a_control_token_without_a_name_cannot_be_asked_for():
    mistral = TOOL_PARSERS["mistral"]
    assert answer_or_calls(SCHEMA, mistral, TOOLS, ["[TOOL_CALLS]"]) is None
    assert json.loads(answer_or_calls(SCHEMA, mistral, TOOLS, ["</s>"]))
