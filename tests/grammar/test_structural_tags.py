"""Structural tags: what is taken, what is not, and what comes out of the engine."""

import json
import re

import jsonschema
import pytest

from quire import LLM, SamplingParams, embedded
from quire.errors import InvalidParameter
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.library import GrammarError
from quire.grammar.source import source_of
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.params import StructuredOutputsParams as Form

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
NAME = {"enum": ["ada", "bob"]}
OLD = {
    "structures": [
        {"begin": "<call=go>", "schema": POINT, "end": "</call>"},
        {"begin": "<call=stop>", "schema": NAME, "end": "</call>"},
    ],
    "triggers": ["<call="],
}
JSON_POINT = {"type": "json_schema", "json_schema": POINT}


def const(text):
    return {"type": "const_string", "value": text}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


ANY = {"type": "any_text"}
AB = [tag("<a>", JSON_POINT, "</a>"), tag("<b>", ANY, "</b>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": AB}
SEPARATED = {"type": "tags_with_separator", "separator": ";", "tags": AB}

CASES = {
    # name: (tag, texts that are whole, texts that are not)
    "old": (
        OLD,
        ["", "free", 'a <call=go>{"x":5}</call> b',
         '<call=stop>"ada"</call><call=go>{"x": 1}</call>'],
        ["<call=", "<call=gone>", '<call=go>{"x":100}</call>', '<call=stop>"eve"</call>'],
    ),
    "const": ({"format": const('a "b"\n/c')}, ['a "b"\n/c'], ["", "a", 'a "b"\n/cd']),
    "schema": ({"format": JSON_POINT}, ['{"x":1}', '{"x": 1}'], ["{}", '{"x":-1}', '{"x":   1}']),
    "regex": ({"format": {"type": "regex", "pattern": r"\d{2}/\/[a-c]"}},
              ["12//a"], ["1//a", "12//d"]),
    "lark": ({"format": {"type": "grammar", "grammar": 'start: "a" start | "b"'}},
             ["aab"], ["aa", ""]),
    "gbnf": ({"format": {"type": "grammar", "grammar": 'root ::= "a" [0-9]'}}, ["a7"], ["a", "b7"]),
    "any": ({"format": ANY}, ["", "a\nb <x>"], []),
    "any but": (
        {"format": {"type": "any_text", "excludes": ["no", "</"]}},
        ["", "on < n o"],
        ["a no", "no", "</"],
    ),
    "sequence": (
        {"format": sequence(const("<t>"), ANY, const("</t>"), JSON_POINT)},
        ['<t></t>{"x":1}', '<t>a <b </t>{"x":1}'],
        ['{"x":1}', '<t>a{"x":1}', "<t></t></t>"],
    ),
    "or": (
        {"format": {"type": "or", "elements": [const("yes"), sequence(const("no "), JSON_POINT)]}},
        ["yes", 'no {"x":1}'],
        ["no", "yes no"],
    ),
    "tag": ({"format": tag("<a>", JSON_POINT, "</a>")},
            ['<a>{"x":1}</a>'], ['<a>{"x":1}', "<a></a>"]),
    "two ends": ({"format": tag("<", JSON_POINT, [">", "/>"])},
                 ['<{"x":1}/>', '<{"x":1}>'], ['<{"x":1}']),
    "triggered": (
        {"format": TRIGGERED},
        ["", "free", 'a<a>{"x":1}</a> <b>any<</b>'],
        ["<", "a < b", "<c>", "<b>open"],
    ),
    "at least one": ({"format": {**TRIGGERED, "at_least_one": True}}, ["t<b></b>u"], ["", "free"]),
    "only one": (
        {"format": {**TRIGGERED, "stop_after_first": True}},
        ["", "free", "t<b></b>"],
        ["<b></b>u", "<b></b><b></b>"],
    ),
    "separated": ({"format": SEPARATED}, ["", "<b></b>", "<b></b>;<b>x</b>"], ["<b></b>;", "x"]),
    "some separated": ({"format": {**SEPARATED, "at_least_one": True}}, ["<b></b>"], [""]),
    "control tokens": (
        {"format": sequence(const("a<|user|>b"), tag("<|system|>", ANY, "<|assistant|>"))},
        [[*"a", 3, *"b", 2, *"free <", 4]],
        ["a<|user|>b<|system|><|assistant|>", [*"a", 3, *"b", 2, 3, 4]],
    ),
    "a control token as trigger": (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<|user|>"],
                "tags": [{"begin": "<|user|>go", "content": JSON_POINT, "end": ""}],
            }
        },
        ["", "free", [*"free", 3, *'go{"x":1}', *"free"]],
        [[3], [*"a", 3, *"gone"], [*"a", 2]],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.read(VocabularySource(str(embedded.path()), "hf", 3072))


@pytest.fixture(scope="module")
def guidance(vocabulary):
    return GrammarLibraries(vocabulary, "guidance")


def is_whole(guidance, vocabulary, given, text):
    """Whether the form takes this text, of letters and control tokens, and it may end there."""
    form = guidance.compile(source_of(Form(structural_tag=json.dumps(given))))
    matcher = form.matcher()
    pieces = [text] if isinstance(text, str) else text
    ids = [id for each in pieces for id in ([each] if isinstance(each, int) else vocabulary(each))]
    try:
        matcher.consume(ids)
    except GrammarError:
        return False
    return matcher.native.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_what_a_tag_takes(guidance, vocabulary, name):
    given, right, wrong = CASES[name]
    for text in right:
        assert is_whole(guidance, vocabulary, given, text), text
    for text in wrong:
        assert not is_whole(guidance, vocabulary, given, text), text


REFUSED = {
    "no format": ({}, "structural_tag needs format"),
    "unknown format": ({"format": {"type": "qwen_xml_parameter"}},
                       "'qwen_xml_parameter' is not a format"),
    "unknown field": ({"format": {**ANY, "lazy": 1}}, "any_text has no field lazy"),
    "empty": ({"structures": [], "triggers": ["<"]}, "at least one of its structures"),
    "no trigger": ({**OLD, "triggers": ["<tool"]}, "begins with no trigger"),
    "triggers in each other": ({**OLD, "triggers": ["<", "<call="]}, "no trigger may begin"),
    "any text before a rule": ({"format": sequence(ANY, JSON_POINT)}, "followed by a text"),
    "a bad schema": ({"format": {"type": "json_schema", "json_schema": False}}, "no value follows"),
    "a style": ({"format": {**JSON_POINT, "style": "qwen_xml"}}, "no style 'qwen_xml'"),
    "a cut escape": ({"format": {"type": "regex", "pattern": "a\\"}}, "middle of an escape"),
    "no end": ({"format": {"type": "tag", "begin": "a", "content": ANY}}, "needs an end"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_anything_but_a_tag_is_refused_in_words(guidance, name):
    given, words = REFUSED[name]
    with pytest.raises(GrammarError, match=words):
        guidance.compile(source_of(Form(structural_tag=json.dumps(given))))


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=16, max_model_len=512, disable_log_stats=True) as engine:
        yield engine


def generate(llm, form, number, **fields):
    params = [
        SamplingParams(temperature=1.0, seed=n, structured_outputs=form, **fields)
        for n in range(number)
    ]
    outputs = llm.generate(["def f():"] * number, params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def test_every_output_has_the_form(llm):
    """A model that draws at random; what it wrote is read by expressions of the tests' own."""
    given = {
        "format": {
            **SEPARATED,
            "at_least_one": True,
            "tags": [tag("<a>", JSON_POINT, "</a>"), tag("<b>", JSON_POINT, "</b>")],
        }
    }
    form = Form(structural_tag=json.dumps(given))
    end = {llm.get_tokenizer().eos_token_id: 25.0}  # a small model would go on for long
    found = generate(llm, form, 24, max_tokens=200, logit_bias=end)
    ended = [each for each in found if each.finish_reason == "stop"]
    assert ended
    for each in ended:
        for part in each.text.split(";"):
            found = re.fullmatch(r"<([ab])>(.*)</\1>", part, re.S)
            assert found, each.text
            jsonschema.validate(json.loads(found[2]), POINT)


def test_a_trigger_in_free_text_is_held_to_its_tag(llm):
    form = Form(structural_tag=json.dumps({**OLD, "triggers": ["<"], "structures": [
        {**each, "begin": each["begin"].replace("<call=", "<")} for each in OLD["structures"]
    ]}))  # fmt: skip
    bias = dict.fromkeys(llm.get_tokenizer().encode("<"), 6.0)
    found = generate(llm, form, 12, max_tokens=60, logit_bias=bias)
    parts = [part for each in found for part in re.findall(r"<[^/].*?</call>", each.text, re.S)]
    assert parts
    for part in parts:
        assert re.fullmatch(
            r'<go>\{[ \n]?"x"[ \n]?:[ \n]?\d+[ \n]?\}</call>|<stop>"(ada|bob)"</call>', part
        )


def test_the_engine_refuses_by_name(llm):
    with pytest.raises(InvalidParameter, match=r"structured_outputs\.structural_tag"):
        generate(llm, Form(structural_tag='{"format": {"type": "nothing"}}'), 1)
