"""xgrammar as the library: what it is given, what comes out, and who serves the rest."""

import importlib.util
import itertools
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest

from quire import LLM, SamplingParams, embedded
from quire.config.structured_outputs_config import structured_outputs_config
from quire.errors import InvalidParameter
from quire.grammar import xgrammar_subset
from quire.grammar.bits import mask_words
from quire.grammar.guidance import Guidance
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.library import GrammarError
from quire.grammar.lowering import lowered
from quire.grammar.source import GrammarSource, LoweredSource, source_of
from quire.grammar.trial import GrammarTrials
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.params import StructuredOutputsParams as Form
from tests.grammar.schemas import bounded_schema, without_strings

needs_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"
)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TEXT = {"type": "string"}


def closed(**properties):
    return {"type": "object", "properties": properties, "additionalProperties": False}


TAKEN = {
    "anything": {},
    "an object": {"type": "object"},
    "values of one kind": {"type": "object", "additionalProperties": DIGIT},
    "a closed object": closed(a=DIGIT, b=TEXT) | {"required": ["b"]},
    "names in need of escapes": closed(**{'q"x': DIGIT, "ü\n": DIGIT, "": DIGIT}),
    "a list": {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 3},
    "a tuple": {"type": "array", "prefixItems": [DIGIT, TEXT], "items": False, "minItems": 2},
    "a range": {"type": "integer", "exclusiveMinimum": -40, "maximum": 1234},
    "a range of fractions": {"type": "number", "minimum": 1.5, "maximum": 2.25},
    "a pattern": {"type": "string", "pattern": r"^[a-z]{1,4}-(\d{2}|x)$"},
    "an id": {"type": "string", "format": "uuid"},
    "one of several": {"enum": ["a", 1, None, {"b": [2]}]},
    "one of several texts": {"type": "string", "enum": ["a", 'b"']},
    "one value": {"const": {"a": [1, None, 'x\n"\\ü\u2028']}},
    "one of several schemas": {"anyOf": [DIGIT, {"type": "null"}]},
    "a type of several": {"type": ["boolean", "null"]},
    "shared": {"$ref": "#/$defs/x", "$defs": {"x": DIGIT}, "title": "T", "default": 3},
    "nested in itself": closed(v=DIGIT, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
}
LEFT = {
    "a name that is said twice": {"type": "object", "properties": {"a": DIGIT}},
    "an open rest": {"type": "object", "properties": {"a": DIGIT}, "additionalProperties": TEXT},
    "a needed name without a rule": closed(a=DIGIT) | {"required": ["b"]},
    "names by pattern": {"type": "object", "patternProperties": {"^a": DIGIT}},
    "fewest properties": {"type": "object", "minProperties": 2},
    "names that go together": closed(a=DIGIT, b=DIGIT) | {"dependentRequired": {"a": ["b"]}},
    "contained": {"type": "array", "items": DIGIT, "contains": {"const": 2}},
    "no two equal": {"type": "array", "items": DIGIT, "uniqueItems": True},
    "a tuple of old": {"type": "array", "items": [DIGIT]},
    "a multiple": {"type": "integer", "multipleOf": 7},
    "a fraction as a bound": {"type": "integer", "minimum": 1.5},
    "a huge bound": {"type": "integer", "minimum": 10**20},
    "a bound of old": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
    "a length": {"type": "string", "maxLength": 4},
    "a pattern without anchors": {"type": "string", "pattern": "a+"},
    "a pattern without its end": {"type": "string", "pattern": "^a"},
    "a pattern with anchors of alternatives": {"type": "string", "pattern": "^a|b$"},
    "an address, of which it knows the common ones": {"type": "string", "format": "email"},
    "a pattern and a length": {"type": "string", "pattern": "^a+$", "maxLength": 3},
    "a pattern that needs escapes": {"type": "string", "pattern": '^["a]$'},
    "a pattern of all but": {"type": "string", "pattern": "^[^a]$"},
    "a pattern with blanks": {"type": "string", "pattern": r"^\s$"},
    "a pattern of any": {"type": "string", "pattern": "^.$"},
    "a format and a length": {"type": "string", "format": "date", "maxLength": 3},
    "a format that it gets wrong": {"type": "string", "format": "ipv4"},
    "days that a year does not have": {"type": "string", "format": "date"},
    "labels of any length": {"type": "string", "format": "hostname"},
    "decimals that it cuts": {"type": "number", "maximum": 745476868088.927},
    "values of another type": {"type": "string", "enum": ["a", 1]},
    "a value of another type": {"type": "string", "const": 1},
    "bounds without a type": {"minimum": 3},
    "bounds of one of two types": {"type": ["integer", "null"], "minimum": 3},
    "exactly one": {"oneOf": [DIGIT, {"type": "integer", "minimum": 5}]},
    "all": {"allOf": [DIGIT, {"type": "integer", "maximum": 5}]},
    "none": DIGIT | {"not": {"const": 2}},
    "a condition": DIGIT | {"if": {"minimum": 5}, "then": {"maximum": 7}},
    "a choice with more": {"type": "integer", "anyOf": [{"maximum": 9}]},
    "a reference with more": {"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": DIGIT}},
    "a reference elsewhere": {"$ref": "http://127.0.0.1:9/schema"},
    "an anchor": {"$ref": "#x", "$defs": {"x": DIGIT}},
    "an unknown part of a definition": {"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}},
    "nothing": {"type": "array", "items": {"not": {}}},
    "no names": {"type": "object", "required": [["a"]], "properties": []},
}
"""Each is dropped, or read otherwise, by xgrammar 0.2.8."""


def source(schema):
    return source_of(Form(json=schema))


def takes(schema):
    return xgrammar_subset.takes(LoweredSource("schema", json.dumps(schema)))


@pytest.mark.parametrize("name", TAKEN)
def test_schemas_that_it_is_given(name):
    assert takes(TAKEN[name])
    assert xgrammar_subset.takes(lowered(source(TAKEN[name]), ()))


@pytest.mark.parametrize("name", LEFT)
def test_schemas_that_are_left_to_llguidance(name):
    assert not takes(LEFT[name])
    assert not takes(closed(a={"anyOf": [DIGIT, LEFT[name]]}))


@pytest.mark.parametrize(
    ("form", "is_taken"),
    [
        (Form(json_object=True), True),
        (Form(json={}, disable_any_whitespace=True), True),
        (Form(json={}, whitespace_pattern=" ?"), False),
        (Form(choice=["a"]), True),
        (Form(grammar='root ::= "a"'), True),
        (Form(grammar='start: "a"'), False),
        (Form(structural_tag='{"format": {"type": "any_text"}}'), False),
    ],
)
def test_kinds(form, is_taken):
    assert xgrammar_subset.takes(lowered(source_of(form), ())) == is_taken


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (r"\d{3}-[a-z]{2,5}", r"\d{3}-[a-z]{2,5}"),
        (r"^(?:a.b)|[.\]]\.$", r"^(?:a[^\n]b)|[.\]]\.$"),
        *((wrong, None) for wrong in (r"\W", r"[^\W]", r"\bx", r"\Ax", "(?i)a", "(?=a)b", "a^b")),
        *((wrong, None) for wrong in ("a$b", r"(?P<n>a)", r"\1", r"\p{L}", "[[a]]", "[", r"\x41")),
    ],
)
def test_patterns(pattern, read):
    assert xgrammar_subset.regex(pattern) == read


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.read(VocabularySource(str(embedded.path()), "hf", 3072))


@pytest.fixture(scope="module")
def libraries(vocabulary):
    return GrammarLibraries(vocabulary, "xgrammar")


def walk(vocabulary, form, seed, most=400):
    """A text drawn by masks alone, and whether it ended; quotes and brackets are drawn often."""
    rng = random.Random(seed)
    matcher, ids = form.matcher(), []
    mask = np.zeros((1, mask_words(len(vocabulary.tokens))), dtype=np.int32)
    while len(ids) < most and not matcher.has_ended:
        matcher.library.fill([(matcher, 0)], mask)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little").nonzero()[0].tolist()
        assert allowed, "a dead end"
        assert not set(allowed) & set(vocabulary.special_ids) - set(vocabulary.eos_ids)
        closing = [i for i in allowed if vocabulary.tokens[i] in (b'"', b"}", b"]", b",")]
        index = rng.choice(closing if closing and rng.random() < 0.4 else allowed)
        if index in vocabulary.eos_ids:
            return ids, True
        matcher.consume([index])
        ids.append(index)
    return ids, len(ids) < most


def text_of(vocabulary, ids):
    return b"".join(vocabulary.tokens[i] for i in ids).decode(errors="replace")


def check_json(vocabulary, form, schema, seed):
    ids, has_ended = walk(vocabulary, form, seed)
    if has_ended:
        text = text_of(vocabulary, ids)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert not re.search(r"\s\s", without_strings(text)) and text == text.strip()
    return has_ended


@needs_xgrammar
@pytest.mark.parametrize("name", TAKEN)
def test_random_texts_of_a_schema_are_valid(vocabulary, libraries, name):
    form = libraries.compile(source(TAKEN[name]))
    assert not isinstance(form.matcher().library, Guidance)
    assert sum(check_json(vocabulary, form, TAKEN[name], seed) for seed in range(20)) > 5


@needs_xgrammar
def test_random_texts_of_random_schemas_are_valid(vocabulary, libraries):
    """Of those that it is given, which are fewer: many have strings with a length."""
    schemas = [bounded_schema(seed) for seed in range(300)]
    given = [schema for schema in schemas if xgrammar_subset.takes(lowered(source(schema), ()))]
    assert len(given) > 30
    ended = 0
    for seed, schema in enumerate(given):
        ended += check_json(vocabulary, libraries.compile(source(schema)), schema, seed)
    assert ended > 0.9 * len(given)


@needs_xgrammar
@pytest.mark.parametrize(
    "pattern", [r"\d{3}-[a-z]{2,5}", r"(yes|no)( please)?", r"^a.b\n[^\n]{0,5}$", r"[\w\-.]{1,8}@x"]
)
def test_random_texts_of_a_pattern_match_it(vocabulary, libraries, pattern):
    form = libraries.compile(source_of(Form(regex=pattern)))
    for seed in range(30):
        ids, has_ended = walk(vocabulary, form, seed)
        text = text_of(vocabulary, ids)
        assert has_ended and ("\ufffd" in text or re.fullmatch(pattern, text)), text


@needs_xgrammar
def test_choices_and_grammars(vocabulary, libraries):
    choices = ["no", "not", "nothing at all", "ünï\ncode", 'a "quote"', "\\", "\u2028", "\x00"]
    form = libraries.compile(source_of(Form(choice=choices)))
    found = {text_of(vocabulary, walk(vocabulary, form, seed)[0]) for seed in range(80)}
    assert found == set(choices)
    gbnf = 'root ::= item ("," item)? ";"\nitem ::= [a-c] [a-c]? | "<" [0-9] ">"\n'
    form = libraries.compile(source_of(Form(grammar=gbnf)))
    for seed in range(20):
        text = text_of(vocabulary, walk(vocabulary, form, seed)[0])
        assert re.fullmatch(r"([a-c]{1,2}|<\d>)(,([a-c]{1,2}|<\d>))?;", text)


@needs_xgrammar
def test_a_form_without_blanks(vocabulary, libraries):
    schema = TAKEN["a list"] | {"minItems": 3}
    form = libraries.compile(source_of(Form(json=schema, disable_any_whitespace=True)))
    for seed in range(10):
        ids, has_ended = walk(vocabulary, form, seed)
        assert has_ended and re.fullmatch(r"\[\d,\d,\d\]", text_of(vocabulary, ids))


@needs_xgrammar
@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Form(grammar="root ::= (((("), "EBNF parser error at line 1"),
        (Form(grammar="root ::= missing"), 'Rule "missing" is not defined'),
        (Form(regex="a{3,1}"), "Lower bound is larger than upper bound"),
        (Form(json={"type": "integer", "minimum": 5, "maximum": 3}), "no value follows it"),
        (Form(grammar="root ::= root"), "no text matches it"),
    ],
)
def test_wrong_forms(libraries, form, words):
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        libraries.compile(source_of(form))
    assert ".cc" not in str(caught.value)


@needs_xgrammar
def test_a_token_that_may_not_come_is_an_error(vocabulary, libraries):
    matcher = libraries.compile(GrammarSource("regex", "a")).matcher()
    with pytest.raises(GrammarError, match="left the grammar"):
        matcher.consume([vocabulary.tokens.index(b"b")])


@needs_xgrammar
def test_masks_are_filled_while_another_form_is_compiled(vocabulary, libraries):
    """As in a core, whose forms are compiled in a thread beside its steps. The library's own
    batches end the process then."""
    over = threading.Event()

    def compile_others():
        for n in itertools.takewhile(lambda _: not over.is_set(), itertools.count(1)):
            libraries.compile(source_of(Form(regex=f"[a-z]{{{n % 40}}}")))

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(compile_others)
        form = libraries.compile(source_of(Form(choice=["yes", "no"])))
        matchers = [(form.matcher(), row) for row in range(4)]
        masks = np.zeros((2, 4, mask_words(len(vocabulary.tokens))), dtype=np.int32)
        for turn in range(300):
            matchers[0][0].library.fill(matchers, masks[min(turn, 1)])
        over.set()
        beside.result()
    assert masks[0, 0].any() and (masks == masks[0, 0]).all()


class Broken:
    """A complete text whose next mask cannot be found."""

    def is_terminated(self):
        return False

    def is_completed(self):
        return True

    def fill_next_token_bitmask(self, masks, row):
        raise RuntimeError("[10:20:30] /a/b.cc:7: out of states")


@needs_xgrammar
def test_a_matcher_that_fails_says_so_and_does_not_end_its_text(libraries):
    matcher = libraries.compile(source_of(Form(choice=["yes", "no"]))).matcher()
    matcher._native = Broken()
    assert not matcher.has_ended
    assert matcher.failure == "out of states"


HOSTILE = {
    "repeats of repeats": Form(regex="((a{1,500}){1,500}){1,500}"),
    "thousands of brackets": Form(regex="(" * 5000 + "a" + ")" * 5000),
    "cycle of references": Form(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "huge bounds": Form(json={"type": "string", "minLength": 10**9, "maxLength": 10**12}),
    "ambiguity": Form(grammar='root ::= root root | root | "a"'),
    "many choices": Form(choice=[f"option {n:07d}" for n in range(60_000)]),
}


@needs_xgrammar
def test_hostile_forms_cost_themselves():
    config = structured_outputs_config({"backend": "xgrammar", "compile_time_s": 1.0})
    trials = GrammarTrials(VocabularySource(str(embedded.path()), "hf", 3072), config)
    answers = {}
    for name, form in HOSTILE.items():
        try:
            trials.check(form)
        except InvalidParameter as error:
            answers[name] = str(error)
        trials.check(Form(regex="[a-z]{2,9}"))
    trials.close()
    assert {"cycle of references", "many choices"} <= answers.keys()
    assert all(text.startswith("structured_outputs.") for text in answers.values())


@needs_xgrammar
def test_both_libraries_in_one_batch():
    """Forms that each serves, next to free text: each alone is what it was in the crowd."""
    forms = {
        "ours": Form(json=TAKEN["a closed object"]),
        "theirs": Form(json=LEFT["a name that is said twice"]),
        "lark": Form(grammar='start: "ab"~2..3\n'),
        "choice": Form(choice=["yes", "no"]),
        "free": None,
    }
    params = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=100, n=2, structured_outputs=form)
        for form in forms.values()
    ]
    config = {"backend": "xgrammar"}
    with LLM(max_num_seqs=16, max_model_len=256, structured_outputs_config=config) as llm:
        outputs = llm.generate(["def f(x):"] * len(params), params, use_tqdm=False)
        alone = llm.generate("def f(x):", params[0], use_tqdm=False)[0]
    texts = {
        name: [c.text for c in output.outputs if c.finish_reason == "stop"]
        for name, output in zip(forms, outputs, strict=True)
    }
    assert [c.text for c in alone.outputs] == [c.text for c in outputs[0].outputs]
    for text in texts["ours"]:
        jsonschema.validate(json.loads(text), TAKEN["a closed object"])
    for text in texts["theirs"]:
        jsonschema.validate(json.loads(text), LEFT["a name that is said twice"])
    assert texts["ours"] and set(texts["lark"]) <= {"abab", "ababab"} and len(texts["lark"]) == 2
    assert set(texts["choice"]) <= {"yes", "no"} and len(texts["choice"]) == 2


def test_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidParameter, match=r"Install quire\[xgrammar\]"):
        structured_outputs_config({"backend": "xgrammar"})
