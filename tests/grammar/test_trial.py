"""A grammar that explodes, hangs or kills the compiler costs its own request and nothing else."""

import asyncio
import os
import re
import threading
import time

import pytest

from quire import embedded
from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.errors import InvalidParameter
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.trial import GrammarTrials
from quire.grammar.vocabulary import VocabularySource
from quire.params import StructuredOutputsParams as Form
from tests.config.plans import LAPTOP, make_model

SOURCE = VocabularySource(str(embedded.path()), "hf", 3072)

GOOD = Form(regex="[a-z]{2,9}")
HUGE = Form(choice=[f"option {n:07d}" for n in range(60_000)])
"""Several seconds of computing, and hundreds of MiB."""


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"properties": {"a": schema}}]}
    return schema


HOSTILE = {
    "nested repeats": Form(regex="(a+)+b"),
    "repeats of repeats": Form(regex="((a{1,500}){1,500}){1,500}"),
    "many states": Form(regex="(.*a.{300}){20}"),
    "thousands of brackets": Form(regex="(" * 5000 + "a" + ")" * 5000),
    "unicode classes": Form(regex=r"(\p{L}|\p{N}|\p{S}){1,2000}\p{Greek}+"),
    "empty language": Form(regex="[^\\s\\S]"),
    "cycle of references": Form(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "reference to a network": Form(json={"$ref": "http://127.0.0.1:9/schema"}),
    "reference to a file": Form(json={"$ref": "file:///etc/passwd"}),
    "wrong types": Form(json={"type": 3, "properties": [], "enum": {}}),
    "huge bounds": Form(json={"type": "string", "minLength": 10**9, "maxLength": 10**12}),
    "huge numbers": Form(json={"type": "integer", "minimum": 1e300, "multipleOf": 1e-300}),
    "many properties": Form(
        json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    ),
    "deep alternatives": Form(json=nested(10)),
    "a bad pattern": Form(json={"type": "string", "pattern": "(?=a)"}),
    "ambiguity": Form(grammar='start: start start | start | "a"'),
    "left recursion": Form(grammar='start: start "a" | "a"'),
    "no start": Form(grammar='begin: "a"'),
    "a long rule": Form(grammar="start: " + " | ".join(f'"a{i}" start' for i in range(3000))),
    "not GBNF": Form(grammar="root ::= ((((((("),
    "bad blanks": Form(json={"type": "object"}, whitespace_pattern="("),
}


def make_trials(**limits):
    return GrammarTrials(SOURCE, StructuredOutputsConfig(**limits))


@pytest.fixture(scope="module")
def trials():
    made = make_trials(compile_time_s=1.0)
    yield made
    made.close()


def outcome(trials, form):
    try:
        trials.check(form)
    except InvalidParameter as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_form_has_an_answer(trials, name):
    error = outcome(trials, HOSTILE[name])
    assert error is None or error.startswith("structured_outputs.")
    assert error is None or ("0x" not in error and len(error) < 600)
    assert outcome(trials, GOOD) is None


LARGE = {
    "a huge const": (Form(json={"const": "a" * 400_000}), "too large|each token takes"),
    "a million of one letter": (Form(regex="a{1000000}"), "too large"),
    "repeats in a grammar": (Form(grammar='start: "a"{1000000}'), "too large"),
    "thousands of ways": (
        Form(grammar="start: " + " | ".join(f'"a{i}" start' for i in range(3000))),
        "too large",
    ),
    "two long texts": (Form(json={"enum": ["b" * 500_000, "c" * 400_000]}), "too large"),
    "slow tokens": (Form(json={"const": "a" * 400_000}), "each token takes"),
}


@pytest.fixture(scope="module")
def patient_trials():
    made = make_trials(compile_time_s=30.0)
    yield made
    made.close()


@pytest.mark.parametrize("name", LARGE)
def test_what_would_prove_too_large_is_refused_before_it_runs(patient_trials, name):
    form, says = LARGE[name]
    error = outcome(patient_trials, form)
    assert error and re.search(says, error) and len(error) < 600, error
    assert "<" not in error, error


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"compile_time_s": 0.01}, "takes more than 0.01 s"),
        ({"compile_memory_mib": 1}, "takes more than 1 MiB"),
    ],
)
def test_limits_end_the_process_and_the_next_form_has_a_new_one(limits, text):
    trials = make_trials(**limits)
    assert text in outcome(trials, HUGE)
    assert outcome(trials, Form(choice=["a"])) is None
    assert text in outcome(trials, HUGE), "remembered"
    trials.close()


def test_a_process_that_is_killed_costs_the_form_it_had():
    trials = make_trials()
    assert outcome(trials, GOOD) is None
    first = trials._process._process
    first.kill()
    first.wait()
    assert outcome(trials, GOOD) is None, "known without a process"
    assert "makes the compiler fail" in outcome(trials, Form(regex="b"))
    assert outcome(trials, Form(regex="c")) is None
    trials.close()


def test_close_leaves_no_process():
    trials = make_trials()
    trials.check(GOOD)
    pid = trials._process._process.pid
    trials.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_close_ends_a_trial_that_is_under_way():
    trials = make_trials(compile_time_s=600.0, compile_memory_mib=4096)
    assert outcome(trials, GOOD) is None, "the process has read its vocabulary"
    answers = []
    asking = threading.Thread(target=lambda: answers.append(outcome(trials, HUGE)))
    asking.start()
    while not trials._lock.locked():
        time.sleep(0.001)
    trials.close()
    asking.join(60)
    assert "shutting down" in answers[0]
    assert trials._process is None


def test_the_process_is_there_before_the_first_form_where_it_is_prepared():
    trials = GrammarTrials(SOURCE, StructuredOutputsConfig(prepare=True))
    trials.prepare()
    trials._thread.submit(lambda: None).result(60)
    pid = trials._process._process.pid
    trials.check(GOOD)
    assert trials._process._process.pid == pid
    trials.close()
    plain = make_trials()
    plain.prepare()
    plain._thread.submit(lambda: None).result(60)
    assert plain._process is None
    plain.close()


def test_a_core_has_its_vocabulary_before_the_first_form_where_it_is_prepared():
    compiler = GrammarCompiler(SOURCE, StructuredOutputsConfig(prepare=True))
    compiler.prepare()
    compiler._start(lambda: None).result(60)
    assert compiler._vocabulary is not None and compiler._libraries._made
    compiler.close()


@pytest.mark.parametrize(
    ("given", "args", "vocab_size", "expected"),
    [
        ({}, AsyncEngineArgs, 151_936, True),
        ({}, AsyncEngineArgs, 300, False),
        ({}, EngineArgs, 151_936, False),
        ({"prepare": False}, AsyncEngineArgs, 151_936, False),
        ({"prepare": True}, EngineArgs, 300, True),
    ],
)
def test_large_vocabularies_are_prepared_on_engines_that_serve(given, args, vocab_size, expected):
    wish = args(model="m", structured_outputs_config=given)
    plan = resolve(wish, make_model(vocab_size=vocab_size, generation_config={}), LAPTOP)
    assert plan.sampling.structured_outputs.prepare is expected


def test_a_vocabulary_that_grammars_cannot_use_is_said_to_each_request(tmp_path):
    for file in embedded.path().glob("*token*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    trials = GrammarTrials(VocabularySource(str(tmp_path), "hf", 3072), StructuredOutputsConfig())
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="no token that ends a text"):
            trials.check(GOOD)
        assert trials._process is None
    trials.close()


def test_a_slow_grammar_holds_up_nobody(monkeypatch):
    """While one is tried, other requests of the same event loop run from beginning to end."""
    from quire import AsyncEngineArgs, SamplingParams
    from quire.engine.async_llm import AsyncLLM

    go_on = threading.Event()
    real = GrammarTrials.check

    def check(self, form):
        if form.regex == "slow":
            assert go_on.wait(60)
        real(self, form)

    monkeypatch.setattr(GrammarTrials, "check", check)

    async def last(engine, name, **fields):
        params = SamplingParams(max_tokens=8, **fields)
        outputs = [output async for output in engine.generate("x = ", params, name)]
        return outputs[-1].outputs[0]

    async def both():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=4, max_model_len=128))
        slow = asyncio.create_task(last(engine, "slow", structured_outputs=Form(regex="slow")))
        await asyncio.sleep(0)
        quick = await last(engine, "quick")
        is_waiting = not slow.done()
        go_on.set()
        done = await slow
        engine.shutdown()
        return quick, is_waiting, done

    quick, is_waiting, done = asyncio.run(both())
    assert quick.finish_reason == "length" and is_waiting
    assert (done.text, done.finish_reason) == ("slow", "stop")
