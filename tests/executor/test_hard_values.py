"""Results and errors of workers that are hard to send: every call is answered, no core dies."""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.errors import EngineError, InvalidParameter, RequestError
from tests.executor.worker_values import HALF, VALUES, cyclic, deep

EXTENSION = "tests.executor.worker_values.Values"
ARGS = {"dtype": "float32", "num_gpu_blocks_override": 60, "max_model_len": 64}


@pytest.fixture(scope="module")
def apart():
    """An engine in a process of its own; after the tests it is the first one still."""
    with LLM(**ARGS, worker_extension_cls=EXTENSION, enable_multiprocessing=True) as llm:
        yield llm
        [output] = llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert llm.llm_engine.front_end.client.num_restarts == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("an int of 71 bits", "it has an int of more than 64 bits"),
        ("a key of 71 bits", "it has an int of more than 64 bits"),
        ("a list in itself", "it is nested more than 64 levels deep, or holds itself"),
        ("900 levels", "it is nested more than 64 levels deep, or holds itself"),
        ("5000 levels", "it is nested more than 64 levels deep, or holds itself"),
        ("an object", "it has a builtins.object: give plain values and numpy arrays"),
    ],
)
def test_a_result_that_cannot_be_sent_is_the_call_s_error(apart, kind, why):
    with pytest.raises(EngineError, match="The result cannot be sent to another process") as caught:
        apart.collective_rpc("give", args=(kind,))
    assert why in str(caught.value)


def test_results_that_can_be_sent_are(apart):
    [arrays] = apart.collective_rpc("give", args=("arrays",))
    assert len(arrays) == 3000 and np.array_equal(arrays[2999], np.full(100, 2999))
    assert apart.collective_rpc("give", args=("60 levels",)) == [deep(60)]
    assert apart.collective_rpc("give", args=("a lone surrogate",)) == [
        {"a\\udc80b": ["a\\udc80b"]}
    ]
    assert apart.collective_rpc("give", args=("a pair as key",)) == [{(1, 2): 3}]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("a lone surrogate", EngineError, "a\\udc80b"),
        ("ours, a lone surrogate", RequestError, "a\\udc80b"),
        ("no text", EngineError, "Mute"),
        ("a megabyte", EngineError, "x" * 2**14),
        ("the end of the program", EngineError, "SystemExit: 3"),
    ],
)
def test_an_error_is_told_whatever_it_says(apart, kind, error, text):
    with pytest.raises(error) as caught:
        apart.collective_rpc("fail", args=(kind,))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (HALF, "a lone surrogate"),
        (2**70, "an int of more than 64 bits"),
        (-(2**63) - 1, "an int of more than 64 bits"),
        (cyclic(), "holds itself"),
        (deep(900), "nested more than 64 levels"),
        (object(), "cannot be sent to another process"),
    ],
    ids=["a lone surrogate", "large", "small", "cyclic", "deep", "object"],
)
@pytest.mark.parametrize("place", ["args", "kwargs", "within"])
def test_an_argument_that_cannot_be_sent_is_refused_by_name(apart, place, value, why):
    given = {
        "args": {"args": (value,)},
        "kwargs": {"kwargs": {"kind": value}},
        "within": {"args": ([{"a": value}],)},
    }[place]
    with pytest.raises(InvalidParameter, match=why) as caught:
        apart.collective_rpc("give", **given)
    assert caught.value.parameter == "collective_rpc"


def test_a_worker_of_this_process_is_asked_as_it_is():
    with LLM(**ARGS, worker_extension_cls=EXTENSION) as llm:
        for kind in ("an int of 71 bits", "900 levels", "a lone surrogate"):
            assert llm.collective_rpc("give", args=(kind,)) == [VALUES[kind]()]


@pytest.mark.parametrize("value", [HALF, "x\ud800"])
def test_extra_args_that_cannot_be_sent_are_the_request_s_error(apart, value):
    for extra in ({"a": value}, {value: 1}, {"a": [value]}):
        with pytest.raises(RequestError):
            apart.generate("a", SamplingParams(extra_args=extra), use_tqdm=False)
    assert apart.llm_engine.front_end.outputs.num_unfinished == 0
    assert not apart.llm_engine.front_end.client.supervisor.has_requests
