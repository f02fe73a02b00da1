"""Steps of the core become outputs: every kind and every cutting tells the same."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.outputs.logprobs import Positions
from quire.engine.wire.messages import EngineCoreOutputs
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.outputs import FlatLogprobs
from quire.params import RequestOutputKind, SamplingParams
from quire.step.columns import PooledOutput
from quire.testing.scripted_core import logprob_row, rank, value
from quire.text.detokenizer import IncrementalDetokenizer
from tests.engine.frontend.scripted_engines import embedded_tokenizer, make_engine, run, whole

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = [5, 6, 7]


def ids_of(text):
    return embedded_tokenizer().encode(text, add_special_tokens=False)


def make_widths(seed, most):
    """Tokens per step: different for each request and step, but the same for the same seed."""
    rng = random.Random(seed)
    return lambda handle: rng.randint(0, most)


def oracle(script, params, eos):
    """(text, ids, finish reason, stop reason), by looking at everything after each token."""
    detokenizer = IncrementalDetokenizer(embedded_tokenizer(), PROMPT)
    text, boundary = "", 0
    for count, token_id in enumerate(script, 1):
        stops = token_id == eos or token_id in params.stop_token_ids
        silent = stops and not params.include_stop_str_in_output
        text += "" if silent else detokenizer.feed([token_id])
        for end in range(boundary + 1, len(text) + 1) if count > params.min_tokens else ():
            for stop in params.stop:
                if text[:end].endswith(stop):
                    kept = text[: end if params.include_stop_str_in_output else end - len(stop)]
                    return kept, script[:count], "stop", stop
        boundary = len(text)
        if stops:
            return text, script[:count], "stop", None if token_id == eos else token_id
        if count == params.max_tokens:
            return text, script[:count], "length", None
    raise AssertionError("the script is too short")


@st.composite
def requests(draw):
    """A script over the whole vocabulary, and parameters whose stop strings lie in its text."""
    vocab_size = embedded_tokenizer().vocab_size
    script = draw(st.lists(st.integers(0, vocab_size - 1), min_size=20, max_size=20))
    text = embedded_tokenizer().decode(script, skip_special_tokens=True)
    starts = st.integers(0, max(0, len(text) - 1))
    stops = [
        text[start : start + draw(st.integers(1, 6))]
        for start in draw(st.lists(starts, max_size=2))
    ]
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 20)),
        stop=[stop for stop in stops if stop and "\ufffd" not in stop],
        stop_token_ids=draw(st.lists(st.sampled_from(script), max_size=1)),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 1, 5])),
        flat_logprobs=draw(st.booleans()),
    )
    params.min_tokens = draw(st.integers(0, params.max_tokens))
    return script, params


@settings(deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3), st.integers(0, 2**32), st.integers(1, 4))
def test_every_kind_and_cutting_tells_the_same(batch, seed, most):
    eos = embedded_tokenizer().eos_token_id
    expected = {
        (str(i), 0): oracle(script, params, eos) for i, (script, params) in enumerate(batch)
    }
    for kind in RequestOutputKind:
        engine = make_engine(
            lambda request: batch[request.handle][0], tokens_per_step=make_widths(seed, most)
        )
        for i, (_, params) in enumerate(batch):
            params.output_kind = kind
            engine.add_request(str(i), PROMPT, params)
        found = whole(run(engine), kind)
        assert {key: (*entry[:2], *entry[4:]) for key, entry in found.items()} == expected
        for i, (_, params) in enumerate(batch):
            check_logprobs(found[str(i), 0], params)
        assert not engine.front_end.client.requests, "the core was told of every end"


def check_logprobs(entry, params):
    _, ids, logprobs, cumulative, _, _ = entry
    if params.logprobs is None:
        assert logprobs is None
        assert cumulative is None
        return
    assert cumulative == sum(value(token_id, token_id) for token_id in ids)
    assert len(logprobs) == len(ids)
    vocab_size = embedded_tokenizer().vocab_size
    if isinstance(logprobs, FlatLogprobs):
        assert len(logprobs.token_ids) == sum(map(len, logprobs)), "no token stands there twice"
    for token_id, position in zip(ids, logprobs, strict=True):
        columns, values, _ = logprob_row(token_id, params, vocab_size)
        assert list(position) == list(dict.fromkeys(columns)), "the drawn token first, then by rank"
        assert [entry.logprob for entry in position.values()] == [
            values[columns.index(one)] for one in position
        ]
        ranks = {token_id: rank(token_id)} | {
            one: place for place, one in enumerate(columns[1:], 1)
        }
        assert {one: entry.rank for one, entry in position.items()} == ranks


def start(engine, **fields):
    fields.setdefault("max_tokens", 100)
    engine.add_request("r", PROMPT, SamplingParams(**fields))


@pytest.mark.parametrize(
    ("interval", "own", "sizes"),
    [(1, None, [1] * 8), (3, None, [1, 3, 3, 1]), (2, 3, [1, 3, 3, 1]), (3, 1, [1, 3, 3, 1])],
)
def test_stream_interval_thins_deltas(interval, own, sizes):
    engine = make_engine(lambda request: list(range(10, 18)), stream_interval=interval)
    start(engine, max_tokens=8, stream_interval=own, output_kind=DELTA)
    assert [len(output.outputs[0].token_ids) for output in run(engine)] == sizes


def test_stream_interval_leaves_cumulative_alone():
    engine = make_engine(lambda request: list(range(10, 18)), stream_interval=3)
    start(engine, max_tokens=8)
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
    assert [output.finished for output in outputs] == [False] * 7 + [True]


def test_empty_deltas_are_sent_with_their_ids():
    script = ids_of("é日本🎉!")
    engine = make_engine(lambda request: script)
    start(engine, max_tokens=len(script), output_kind=DELTA)
    outputs = [output.outputs[0] for output in run(engine)]
    assert all(len(output.token_ids) == 1 for output in outputs)
    assert "" in [output.text for output in outputs]
    assert "".join(output.text for output in outputs) == "é日本🎉!"
    assert "\ufffd" not in "".join(output.text for output in outputs)


def test_a_character_that_never_ends_is_dropped():
    script = ids_of("a🎉")[:-1]
    engine = make_engine(lambda request: script)
    start(engine, max_tokens=len(script))
    assert run(engine)[-1].outputs[0].text == "a"


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_several_completions_come_back_in_order(kind):
    scripts = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    engine = make_engine(
        lambda request: scripts[request.handle], tokens_per_step=lambda handle: handle + 1
    )
    start(engine, n=3, max_tokens=3, output_kind=kind)
    outputs = run(engine)
    assert {key: entry[1] for key, entry in whole(outputs, kind).items()} == {
        ("r", index): scripts[index] for index in range(3)
    }
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is FINAL_ONLY:
        assert len(outputs) == 1
        assert [completion.index for completion in outputs[0].outputs] == [0, 1, 2]
    else:
        assert all(len(output.outputs) == 1 for output in outputs)


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs(kind, n, flat):
    engine = make_engine(lambda request: [10, 11, 12])
    start(engine, n=n, max_tokens=3, prompt_logprobs=3, output_kind=kind, flat_logprobs=flat)
    outputs = run(engine)
    having = [output for output in outputs if output.prompt_logprobs is not None]
    assert len(having) == (1 if kind in (DELTA, FINAL_ONLY) else len(outputs))
    positions = having[0].prompt_logprobs
    assert isinstance(positions, FlatLogprobs) is flat
    assert [position and next(iter(position)) for position in positions] == [None, 6, 7]
    params = SamplingParams(logprobs=3)
    for token_id, position in zip(PROMPT[1:], positions[1:], strict=True):
        _, *likeliest = logprob_row(token_id, params, embedded_tokenizer().vocab_size)[0]
        place = likeliest.index(token_id) + 1 if token_id in likeliest else rank(token_id)
        assert position[token_id].rank == place
    asked = [one.sampling_params.prompt_logprobs for one in engine.front_end.client.seen]
    assert asked == [3] + [None] * (n - 1), "one of the completions computes them"


def test_listed_logprobs_are_numbered_as_listed():
    engine = make_engine(lambda request: [10])
    start(engine, max_tokens=1, logprob_token_ids=[4, 10, 8])
    (position,) = run(engine)[-1].outputs[0].logprobs
    assert {token_id: entry.rank for token_id, entry in position.items()} == {10: 2, 4: 1, 8: 3}


@pytest.mark.parametrize("flat", [False, True])
def test_a_token_that_is_as_likely_as_the_first_has_its_place_among_the_likeliest(flat):
    """The columns count every token that is not less likely than it."""
    positions = Positions(flat=flat, most=2, tokenizer=None)
    for drawn, rank_of_drawn in ((5, 2), (9, 2), (7, 4)):
        positions.add([drawn, 5, 9], [-1.0, -1.0, -1.0], rank_of_drawn, [])
    assert [{one: entry.rank for one, entry in each.items()} for each in positions.positions] == [
        {5: 1, 9: 2}, {9: 2, 5: 1}, {7: 4, 5: 1, 9: 2},
    ]  # fmt: skip


def test_decoded_tokens_use_what_came_before():
    script = ids_of("x🎉")
    engine = make_engine(lambda request: script)
    start(engine, max_tokens=len(script), logprobs=0)
    output = run(engine)[-1].outputs[0]
    texts = [
        position[id].decoded_token for id, position in zip(script, output.logprobs, strict=True)
    ]
    assert texts[0] == "x"
    assert texts[-1] == "🎉"
    assert set(texts[1:-1]) <= {""}


def test_without_detokenizing_there_are_no_texts():
    engine = make_engine(lambda request: [10, 11])
    start(engine, max_tokens=2, logprobs=2, detokenize=False)
    output = run(engine)[-1].outputs[0]
    assert (output.text, output.token_ids) == ("", [10, 11])
    assert [entry.decoded_token for entry in output.logprobs[0].values()] == [None, None]


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("num_steps", range(5))
def test_abort_at_every_step(kind, n, num_steps):
    script = ids_of("some words to be cut off")
    engine = make_engine(lambda request: script)
    start(engine, n=n, output_kind=kind, logprobs=0, stop=["never"])
    outputs = list(itertools.chain.from_iterable(engine.step() for _ in range(num_steps)))
    engine.abort_request(["r", "nobody"])
    assert engine.front_end.client.aborted == list(range(n))
    assert not engine.has_unfinished_requests()
    outputs += engine.step()
    assert engine.step() == []
    detokenizer = IncrementalDetokenizer(embedded_tokenizer(), PROMPT)
    text = detokenizer.feed(script[:num_steps])
    for index in range(n):
        entry = whole(outputs, kind)["r", index]
        assert entry[:2] == (text, script[:num_steps]), "held-back text comes out at the end"
        assert entry[4:] == ("abort", None)
        assert len(entry[2]) == num_steps
    assert outputs[-1].finished


def test_abort_keeps_the_reasons_of_what_had_ended():
    engine = make_engine(
        lambda request: [10, 11], tokens_per_step=lambda handle: 2 if handle == 0 else 1
    )
    start(engine, n=2, max_tokens=2, output_kind=FINAL_ONLY)
    assert engine.step() == []
    engine.abort_request("r")
    (output,) = engine.step()
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort"]
    assert engine.front_end.client.aborted == [1]


def test_abort_by_our_ids():
    engine = make_engine(lambda request: [10] * 50)
    first = engine.add_request("same", PROMPT, SamplingParams(max_tokens=50))
    second = engine.add_request("same", PROMPT, SamplingParams(max_tokens=50, n=3))
    assert first != second
    engine.abort_request(["same"], internal=True)
    assert engine.get_num_unfinished_requests() == 4
    engine.abort_request([f"1_{second}", f"9_{second}", "x_y"], internal=True)
    assert engine.front_end.client.aborted == [2]
    engine.abort_request(first, internal=True)
    assert engine.front_end.client.aborted == [2, 0]
    engine.abort_request("same")
    assert engine.front_end.client.aborted == [2, 0, 1, 3]
    assert not engine.has_unfinished_requests()


class Broken:
    """A detokenizer that fails with something that no caller should read."""

    def feed(self, ids):
        raise RuntimeError("at 0xdeadbeef")


def test_one_failing_request_leaves_the_others_alone(caplog):
    engine = make_engine(lambda request: [10, 11, 12, 13])
    for name in "abc":
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=4))
    engine.step()
    engine.front_end.outputs._states[1].text._detokenizer = Broken()
    outputs = run(engine)
    ends = {o.request_id: o.outputs[0] for o in outputs if o.finished}
    assert ends["b"].finish_reason == "error"
    assert ends["b"].error == "the output could not be put together; the engine's log says why"
    assert ends["b"].text == embedded_tokenizer().decode([10])
    assert [ends[name].token_ids for name in "ac"] == [[10, 11, 12, 13]] * 2
    assert engine.front_end.client.aborted == [1]
    assert caplog.messages == ["Request b failed in the front end."]


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("aborts", [False, True])
def test_a_failing_end_is_an_end(kind, aborts):
    engine = make_engine(lambda request: [10, 11])
    start(engine, n=2, max_tokens=2, output_kind=kind)
    outputs = engine.step()
    state = engine.front_end.outputs._states[0]
    state.text._detokenizer = Broken()
    state.text._num_textual += aborts  # something that an abort has to decode
    if aborts:
        engine.abort_request("r")
    found = whole(outputs + run(engine), kind)
    assert found["r", 0][4] == "error"
    assert found["r", 1][4] == ("abort" if aborts else "length")


def test_an_error_of_the_core_carries_its_message(monkeypatch):
    engine = make_engine(lambda request: [10, 11])
    start(engine)
    client = engine.front_end.client
    error = Finished(0, FinishReason.ERROR, None, "It cannot run.")
    monkeypatch.setattr(client, "get_output", lambda: EngineCoreOutputs(finished=[error]))
    (output,) = engine.step()
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "It cannot run."
    assert output.outputs[0].token_ids == []


def test_outputs_of_forgotten_requests_are_passed_over():
    engine = make_engine(lambda request: [10, 11])
    start(engine, logprobs=0, max_tokens=2)
    client = engine.front_end.client
    late = client.get_output()
    late.finished.append(Finished(0, FinishReason.LENGTH))
    engine.abort_request("r")
    processed = engine.front_end.outputs.process(late)
    assert (processed.outputs, processed.stopped) == ([], [])


@pytest.mark.parametrize(
    ("eos", "fields", "reason"),
    [
        (10, {}, ("stop", None)),
        (99, {"stop_token_ids": [10]}, ("stop", 10)),
        (10, {"ignore_eos": True}, ("length", None)),
        (99, {}, ("length", None)),
    ],
)
def test_the_last_token_may_be_eos_and_the_limit(eos, fields, reason):
    class WithEos:
        """The embedded tokenizer with another EOS."""

        def __init__(self):
            self.eos_token_id = eos

        def __getattr__(self, name):
            return getattr(embedded_tokenizer(), name)

    engine = make_engine(lambda request: [9, 10], tokenizer=WithEos())
    start(engine, max_tokens=2, **fields)
    end = run(engine)[-1].outputs[0]
    assert (end.finish_reason, end.stop_reason) == reason
    assert end.token_ids == [9, 10], "the stop token is among the ids"


def test_one_token_per_request_needs_no_counts():
    engine = make_engine(lambda request: [10, 11, 12])
    for name in "ab":
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=3))
    steps = [engine.front_end.client.get_output() for _ in range(3)]
    found = []
    for step in steps:
        step.counts = None
        found += engine.front_end.outputs.process(step).outputs
    assert {key: entry[1] for key, entry in whole(found, CUMULATIVE).items()} == {
        ("a", 0): [10, 11, 12],
        ("b", 0): [10, 11, 12],
    }


def test_what_is_unfinished_is_told_by_the_documented_names():
    engine = make_engine(lambda request: [10, 11, 12])
    outputs = engine.front_end.outputs
    assert not outputs.has_unfinished_requests() and not outputs.get_num_queued_tokens()
    start(engine, n=2, max_tokens=3)
    assert outputs.has_unfinished_requests() and outputs.get_num_unfinished_requests() == 2
    assert outputs.get_num_queued_tokens() == len(PROMPT)
    run(engine)
    assert not outputs.has_unfinished_requests() and not outputs.get_num_queued_tokens()


def test_statistics_of_a_request():
    engine = make_engine(lambda request: [10, 11, 12], log_stats=True)
    engine.add_request("r", PROMPT, SamplingParams(max_tokens=3), arrival_time=17.0)
    metrics = run(engine)[-1].metrics
    assert metrics.arrival_time == 17.0
    assert metrics.num_generation_tokens == 3
    engine = make_engine(lambda request: [10])
    start(engine, max_tokens=1)
    assert run(engine)[-1].metrics is None


def test_a_generation_that_gets_a_pooled_result_fails_alone():
    """Only a core that mixes kinds up would send it; the text is not made of it."""
    engine = make_engine(lambda request: [7, 8, 9])
    for name in ("0", "1"):
        engine.add_request(name, {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=3))
    vector = np.zeros(4, np.float32)
    pooled = EngineCoreOutputs(parts=[PooledOutput(0, vector), PooledOutput(99, vector)])
    processed = engine.front_end.outputs.process(pooled)
    [failed] = processed.outputs
    assert failed.request_id == "0" and failed.outputs[0].finish_reason == "error"
    assert processed.stopped == [0] and engine.front_end.outputs.num_unfinished == 1
