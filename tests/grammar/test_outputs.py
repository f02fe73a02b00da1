"""Forms through the whole engine: what comes out, together with all else that can happen."""

import json
import re

import pytest

from quire import LLM, SamplingParams
from quire.engine.wire.output_parts import FinishReason
from quire.errors import InvalidParameter
from quire.grammar.guidance import GuidanceMatcher
from quire.grammar.library import GrammarError
from quire.params import StructuredOutputsParams as Form
from quire.request_options import RequestOptions
from tests.grammar.schemas import bounded_schema, without_strings

REGEXES = (
    r"\d{3}-[a-z]{2,5}",
    r"(yes|no)( please)?",
    r"^[A-Z]\w{0,6}\s?\.$",
    r"[^\W\d]{3}\W\S\D",
    r"(?i)quire v\d{1,3}\.\d",
    r"a.b\n[^\n]{0,5}",
    r"[\w\-.]{1,8}@[a-z]{1,5}\.(com|org)",
    r"[^[:alph]{3}[[:digt]][]x]{2}[a&&b~~c]{4}[\]\d[]{3}",
)
CHOICES = ["no", "not", "nothing at all", "ünï\ncode", 'a "quote"', "a.*b", "\\"]
SUM = 'start: term ("+" term)~0..3\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/\n'
GBNF = 'root ::= item ("," item)? ";"\nitem ::= [a-c] [a-c]? | "<" [0-9] ">"\n'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=16, max_model_len=512, disable_log_stats=True) as engine:
        yield engine


def sampled(form, **fields):
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": 120, "seed": 5, "structured_outputs": form, **fields}
    )


def generate(llm, *params, prompt="def read(path):"):
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def texts(completions):
    assert {c.finish_reason for c in completions} == {"stop"}, completions
    return [c.text for c in completions]


@pytest.mark.filterwarnings("ignore:Possible (nested set|set )")
@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regular_expression_means_what_it_means_in_python(llm, pattern):
    many = [sampled(Form(regex=pattern), seed=seed) for seed in range(12)]
    found = [c for c in generate(llm, *many) if c.finish_reason == "stop"]
    assert len(found) > 6
    for completion in found:
        assert re.fullmatch(pattern, completion.text), completion.text


def test_choices_come_out_whole(llm):
    many = [sampled(Form(choice=CHOICES), seed=seed) for seed in range(40)]
    found = set(texts(generate(llm, *many)))
    assert found <= set(CHOICES) and len(found) > 1


def test_grammars_in_both_notations(llm):
    for text in texts(generate(llm, *[sampled(Form(grammar=SUM), seed=s) for s in range(8)])):
        assert isinstance(eval(re.sub(r"0*(\d+)", r"\1", text)), int)
    for text in texts(generate(llm, *[sampled(Form(grammar=GBNF), seed=s) for s in range(8)])):
        assert re.fullmatch(r"([a-c]{1,2}|<\d>)(,([a-c]{1,2}|<\d>))?;", text)


def test_any_object_and_options_of_whitespace(llm):
    free, tight, wide = generate(
        llm,
        sampled(Form(json_object=True), max_tokens=300),
        sampled(Form(json=SCHEMA, disable_any_whitespace=True)),
        sampled(Form(json=SCHEMA, whitespace_pattern="  ")),
    )
    assert free.finish_reason == "length" or isinstance(json.loads(free.text), dict)
    assert tight.text == json.dumps(json.loads(tight.text), separators=(",", ":"), ensure_ascii=0)
    assert json.loads(wide.text).keys() == {"name", "sizes"}
    assert set(re.findall(r"\s+", without_strings(wide.text))) <= {"  "}


def test_open_objects_can_be_closed_for_all(llm):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    [closed] = generate(llm, sampled(Form(json=schema, disable_additional_properties=True)))
    assert json.loads(closed.text).keys() == {"a"}


def test_several_completions_each_have_their_own_place(llm):
    found = generate(llm, sampled(Form(regex=r"[a-z]{4,9}!"), n=4))
    assert len(found) == 4
    assert all(re.fullmatch(r"[a-z]{4,9}!", text) for text in texts(found))
    assert len(set(texts(found))) > 1


def test_neighbours_without_a_form_are_not_touched(llm):
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    [alone] = generate(llm, plain)
    among = generate(llm, sampled(Form(json=SCHEMA)), plain, sampled(Form(regex="a+b")))
    assert list(among[1].token_ids) == list(alone.token_ids)


FEW_BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 192}
MANY = [sampled(Form(json=SCHEMA), seed=s) for s in range(8)] + [
    sampled(Form(regex=r"([a-z]+ ){2,6}end"), seed=9),
    sampled(Form(choice=["one", "two"]), seed=10),
    SamplingParams(temperature=1.0, seed=11, max_tokens=40),
]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        FEW_BLOCKS | {"max_num_batched_tokens": 24},
        {"async_scheduling": True},
        FEW_BLOCKS | {"async_scheduling": True},
        {"enforce_eager": True, "cpu_threads": 1},
    ],
    ids=lambda options: " ".join(options),
)
def test_outputs_do_not_depend_on_the_load(llm, options):
    """Chunks, preemption and steps ahead change no token of a request with a grammar."""
    prompt = "import os\n" * 12
    expected = [list(c.token_ids) for c in generate(llm, *MANY, prompt=prompt)]
    with LLM(**{"max_num_seqs": 8, "max_model_len": 256, **options}) as other:
        found = generate(other, *MANY, prompt=prompt)
        if "num_gpu_blocks_override" in options:
            core = other.llm_engine.front_end.client.engine_core
            assert core.scheduler.counters.num_preemptions > 0
    assert [list(c.token_ids) for c in found] == expected


def core_request(llm, params, handle):
    options = RequestOptions(arrival_time=0.0)
    request, _ = llm.llm_engine.front_end.inputs.process("x = ", params, options, handle=handle)
    return request


def run_alone(core, request):
    core.add_request(request)
    ids = list(request.output_token_ids)
    while True:
        outputs = core.step()
        ids += outputs.token_ids
        if outputs.finished:
            return ids, outputs.finished[0]


@pytest.mark.parametrize("form", [Form(json=SCHEMA), Form(regex="[a-z]{3,20}[.]")])
def test_a_request_that_comes_again_goes_on_where_it_was(llm, form):
    core = llm.llm_engine.front_end.client.engine_core
    ids, end = run_alone(core, core_request(llm, sampled(form), 10**6))
    assert end.reason is FinishReason.STOP and end.is_in_text
    for known in range(1, len(ids)):
        again = core_request(llm, sampled(form), 10**6 + known)
        again.output_token_ids = ids[:known]
        found, last = run_alone(core, again)
        assert found == ids
        assert (last.reason, last.is_in_text) == (end.reason, True)


def test_an_output_that_does_not_fit_ends_its_request_alone(llm):
    core = llm.llm_engine.front_end.client.engine_core
    bad = core_request(llm, sampled(Form(regex="[a-z]+!")), 2 * 10**6)
    bad.output_token_ids = llm.get_tokenizer().encode("12", add_special_tokens=False)
    good = core_request(llm, sampled(Form(choice=["left", "right"])), 2 * 10**6 + 1)
    for request in (bad, good):
        core.add_request(request)
    ends = {}
    while core.has_work:
        ends |= {end.handle: end for end in core.step().finished}
    assert ends[good.handle].reason is FinishReason.STOP
    assert ends[bad.handle].reason is FinishReason.ERROR
    assert ends[bad.handle].message.startswith("the request's grammar failed: ")


def test_a_grammar_that_fails_midway_costs_its_request_only(llm, monkeypatch, caplog):
    real, tokens = GuidanceMatcher.consume, []

    def consume(self, token_ids):
        tokens.extend(token_ids)
        if len(tokens) == 7:
            raise GrammarError("a planted failure")
        real(self, token_ids)

    expected = generate(llm, *MANY)
    monkeypatch.setattr(GuidanceMatcher, "consume", consume)
    found = generate(llm, *MANY)
    failed = [i for i, c in enumerate(found) if c.finish_reason == "error"]
    assert len(failed) == 1
    why = "the request's grammar failed: a planted failure"
    assert found[failed[0]].error == why
    assert why in "".join(
        record.getMessage() + str(record.exc_info)
        for record in caplog.records
        if record.name != "quire.engine.offline"  # of all that failed in a batch
    )
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if i not in failed:
            assert list(got.token_ids) == list(wanted.token_ids)


class Panic(BaseException):
    """As the library raises it."""

    __module__ = "pyo3_runtime"


def test_a_panic_of_the_library_costs_the_request_at_fault_only(llm, monkeypatch):
    real, broken = GuidanceMatcher.advance_by, []

    def advance_by(self, token_ids):
        broken.append(self)
        if self is broken[0] and len(token_ids) and len(broken) > 20:
            raise Panic("unreachable")
        return real(self, token_ids)

    expected = generate(llm, *MANY)
    monkeypatch.setattr(GuidanceMatcher, "advance_by", advance_by)
    found = generate(llm, *MANY)
    reasons = [c.finish_reason for c in found]
    assert reasons.count("error") == 1
    assert "failed" in found[reasons.index("error")].error
    for got, wanted in zip(found, expected, strict=True):
        assert got.finish_reason == "error" or list(got.token_ids) == list(wanted.token_ids)


def test_where_a_text_may_end(llm):
    """EOS only where the grammar accepts; its end ends any request, even with ignore_eos."""
    eos = llm.get_tokenizer().eos_token_id
    digits = Form(regex="[0-9]{5,8}")
    pushed, ignoring, longer, cut = generate(
        llm,
        sampled(digits, logit_bias={eos: 100.0}),
        sampled(digits, ignore_eos=True),
        sampled(digits, min_tokens=100),
        sampled(digits, max_tokens=3),
    )
    assert len(pushed.text) >= 5 and pushed.token_ids[-1] == eos
    assert 5 <= len(ignoring.text) <= 8 and eos not in ignoring.token_ids
    assert len(longer.text) == 8 and longer.finish_reason == "stop"
    assert cut.finish_reason == "length"


def test_the_form_and_other_restrictions_hold_together(llm):
    tokenizer = llm.get_tokenizer()
    yes, no = (tokenizer.encode(t, add_special_tokens=False)[0] for t in ("y", "n"))
    allowed, biased, banned, impossible = generate(
        llm,
        sampled(Form(choice=["y", "n"]), allowed_token_ids=[no, tokenizer.eos_token_id]),
        sampled(Form(choice=["y", "n"]), logit_bias={yes: 50.0, 7: 100.0}),
        sampled(Form(choice=["y", "n"]), bad_words=["y"]),
        sampled(Form(choice=["y"]), allowed_token_ids=[no]),
    )
    assert [allowed.text, biased.text, banned.text] == ["n", "y", "n"]
    assert impossible.finish_reason == "error"
    assert "forbid every one" in impossible.error


@pytest.mark.parametrize("is_text", [False, True])
def test_a_form_behind_a_reasoning(llm, is_text):
    tokenizer = llm.get_tokenizer()
    mark = tokenizer.encode("\n\n", add_special_tokens=False)
    given = "\n\n" if is_text else mark
    found = generate(
        llm,
        *[
            sampled(Form(choice=["left", "right"], starts_after=given), seed=s, max_tokens=300)
            for s in range(6)
        ],
    )
    ended = [c for c in found if c.finish_reason == "stop"]
    assert ended
    for completion in ended:
        ids = list(completion.token_ids)
        if is_text:
            texts_before = [tokenizer.decode(ids[:i]) for i in range(len(ids))]
            start = next(i for i, text in enumerate(texts_before) if "\n\n" in text)
        else:
            start = next(i for i in range(len(ids)) if ids[i - len(mark) : i] == mark)
        assert tokenizer.decode(ids[start:]) in ("left", "right")


CUT = "ends in the middle of an escape"
BAD = [
    ("regex", "(a", "unclosed group"),
    ("regex", "a\\", CUT),
    ("json", {"type": "string", "pattern": "a\\"}, CUT),
    ("json", {"type": "object", "patternProperties": {"a\\": True}}, CUT),
    ("json", {"contains": {"type": "null"}}, "contains is not supported"),
    ("grammar", "start: missing", "unknown name"),
    ("structural_tag", '{"structures": [], "triggers": []}', "at least one of its structures"),
]


@pytest.mark.parametrize(("kind", "value", "text"), BAD)
def test_what_cannot_be_served_is_refused_by_its_name(llm, kind, value, text):
    with pytest.raises(InvalidParameter, match=text) as caught:
        generate(llm, sampled(Form(**{kind: value})))
    assert str(caught.value).startswith(f"structured_outputs.{kind}=")
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_core_in_a_process_serves_forms():
    with LLM(max_num_seqs=8, max_model_len=256, enable_multiprocessing=True) as other:
        schemas = [bounded_schema(seed) for seed in range(3)]
        found = generate(other, *[sampled(Form(json=s)) for s in schemas])
    for completion in found:
        assert completion.finish_reason == "length" or json.loads(completion.text) is not Ellipsis
