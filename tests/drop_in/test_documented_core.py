"""`EngineCore` by its documented constructor and ids, and what documented attributes say."""

import inspect

import numpy as np
import pytest

from quire import LLM, EngineArgs, PoolingRequestOutput, RequestOutput, SamplingParams
from quire.config.args.option import options_of
from quire.engine import (
    DPEngineCoreProc,
    EngineCore,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreProc,
    EngineCoreRequest,
    EngineDeadError,
    InputStreamError,
    RequestOutputCollector,
)
from quire.engine.client.inproc import InprocClient
from quire.engine.client.multiprocess import AsyncMPClient, SyncMPClient
from quire.engine.counterparts import COUNTERPARTS
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.output_processor import OutputProcessor
from quire.engine.llm_engine import LLMEngine
from quire.errors import InvalidParameter, InvalidType
from quire.executor.backends import executor_class_of
from quire.processes.codec import BadMessage, MessageDecoder, MessageEncoder

SMALL = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_model_len": 128}


@pytest.fixture(scope="module")
def plan():
    return EngineArgs(**SMALL).create_engine_config()


@pytest.fixture(scope="module")
def core(plan):
    made = EngineCore(plan, executor_class_of(plan), log_stats=False)
    yield made
    made.shutdown()


def request(name, ids=(5, 6, 7), **params):
    params = SamplingParams(temperature=0.0, **{"max_tokens": 4, "ignore_eos": True} | params)
    return EngineCoreRequest(name, list(ids), None, params, None, 1.0, None, None, None)


def stepped(core):
    found = []
    while True:
        outputs, was_run = core.step()
        if not outputs:
            assert not was_run
            return found
        found += outputs[0].outputs


def test_a_core_is_stepped_by_ids(core):
    core.add_request(*core.preprocess_add_request(request("a")))
    core.add_request(request("b", max_tokens=None))
    with pytest.raises(InvalidParameter, match="request_id"):
        core.add_request(request("a"))
    first, was_run = core.step()
    assert was_run and {output.request_id for output in first[0].outputs} <= {"a", "b"}
    core.abort_requests(["b", "unknown"])
    outputs = first[0].outputs + stepped(core)
    assert {output.request_id for output in outputs if output.finished} == {"a"}
    ids = [token for out in outputs if out.request_id == "a" for token in out.new_token_ids]
    assert len(ids) == 4 and all(outputs.scheduler_stats is None for outputs in first.values())
    core.add_request(request("a"))
    again = [token for output in stepped(core) for token in output.new_token_ids]
    assert again == ids, "the id is free again, and the answer the same"


def test_a_core_refuses_what_the_plan_does_not_name(plan):
    with pytest.raises(NotImplementedError, match="executor_class"):
        EngineCore(plan, object, True)
    with pytest.raises(TypeError, match="vllm_config"):
        EngineCore(object(), None, True)


def test_a_failed_device_is_told_once(core, monkeypatch):
    called = []
    monkeypatch.setattr(core, "_executor_fail_callback", lambda: called.append(1))

    def fail(*args):
        raise EngineDeadError()

    monkeypatch.setattr(core.scheduler, "schedule", fail)
    core.add_request(request("c"))
    with pytest.raises(EngineDeadError, match="its log says why"):
        core.step()
    assert called == [1]
    monkeypatch.undo()
    core.abort_requests(["c"])


# messages


def test_positions_are_those_of_the_reference_or_an_error():
    made = EngineCoreRequest(
        "r", [3], None, SamplingParams(), None, 5.0, None, "salt", 1, None, None, 0, 0, 7,
        {"a": "b"}, False, "outside",
    )  # fmt: skip
    assert (made.priority, made.cache_salt, made.external_req_id) == (7, "salt", "outside")
    for wrong in (
        (3, [3]),  # what was the first field of ours
        ("r", [3], None, SamplingParams(), None, None, 5.0),  # an end token came before the time
        ("r", [3], None, SamplingParams(), None, 5.0, None, 8),
    ):
        with pytest.raises(TypeError):
            EngineCoreRequest(*wrong)
    output = EngineCoreOutput("r", [1])
    assert EngineCoreOutputs(0, [output]).outputs == [output]
    for wrong in (([1], [output]), (0, [output], None, None), (0, 5)):
        with pytest.raises(TypeError):
            EngineCoreOutputs(*wrong)
    with pytest.raises(InvalidType, match="events"):
        EngineCoreOutput("r", [1], None, None, None, None, None, {"kv": 1})


def test_outputs_are_assigned_and_appended_to():
    first, second = EngineCoreOutput("3", [1]), EngineCoreOutput("x", [2, 4])
    made = EngineCoreOutputs(engine_index=1)
    assert made.timestamp > 0
    made.outputs = [first]
    made.outputs.append(second)
    assert (made.handles[0], made.token_ids, made.counts) == (3, [1, 2, 4], [1, 2])
    assert [output.request_id for output in made.outputs] == ["3", "x"]
    made.outputs[0] = second
    del made.outputs[1]
    assert made.token_ids == [2, 4] and made.names == {made.handles[0]: "x"}
    outputs = made.outputs
    outputs += [first]
    assert made.outputs == [second, first] and made.outputs != [first]


def test_events_and_errors_are_made_as_documented():
    before = EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)
    assert 0 < before.timestamp <= EngineCoreEvent.new_event(before.type).timestamp
    assert EngineCoreEvent.new_event(before.type, 2.0).timestamp == 2.0
    assert str(InputStreamError(ValueError("no more"))) == "no more"
    assert str(EngineDeadError()) and EngineDeadError("why").args == ("why",)


def test_outputs_of_other_releases_are_made(caplog):
    for _ in range(2):
        made = RequestOutput("r", None, [1], None, [], True, other_release=1)
    assert made.finished and len(caplog.records) == 1
    assert "other_release" in caplog.text


# documented attributes


CLASSES = {
    "EngineCore": EngineCore, "EngineCoreProc": DPEngineCoreProc, "InprocClient": InprocClient,
    "MPClient": SyncMPClient, "InputProcessor": InputProcessor, "EngineAttributes": LLMEngine,
    "OutputProcessor": OutputProcessor, "RequestOutputCollector": RequestOutputCollector,
}  # fmt: skip
PLACES = [(owner, name) for owner, names in COUNTERPARTS.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda each: str(each))
def test_what_is_missing_names_its_counterpart(owner, name):
    kind = CLASSES[owner]
    assert issubclass(DPEngineCoreProc, EngineCoreProc) and issubclass(AsyncMPClient, object)
    made = kind.__new__(kind)
    if hasattr(kind, name):
        assert owner != "InprocClient" or name in ("collective_rpc", "save_sharded_state")
        return  # some classes of the family have it
    with pytest.raises(AttributeError) as caught:
        getattr(made, name)
    head, _, hint = str(caught.value).partition(". ")
    assert name in head and len(hint.split()) >= 2 and hint.endswith(".")


def test_a_name_that_nobody_documents_is_an_ordinary_error(core):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        _ = core.nothing


# LLM


def test_llm_takes_what_is_documented():
    with LLM(**SMALL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        [wanted] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        for ids in (np.array([5, 6, 7]), {"prompt_token_ids": np.array([5, 6, 7])}):
            [found] = llm.generate(ids, params, use_tqdm=False)
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        two = llm.generate(np.array([[5, 6, 7], [5, 6, 8]]), params, use_tqdm=False)
        assert two[0].outputs[0].token_ids == wanted.outputs[0].token_ids and len(two) == 2
        llm.enqueue([[5, 6, 7]], params, use_tqdm=False)
        kinds = (RequestOutput, PoolingRequestOutput)
        [queued] = llm.wait_for_completion(kinds, use_tqdm=False)
        assert queued.outputs[0].token_ids == wanted.outputs[0].token_ids
        with pytest.raises(TypeError, match="output_type"):
            llm.wait_for_completion(str)
        template = "{{ messages[0].content }}"
        [chat] = llm.chat([{"role": "user", "content": "def"}], params, False, None, template)
        assert chat.prompt == "def"
        engine = llm.llm_engine
        with pytest.raises(AttributeError, match="vllm_config.observability_config"):
            _ = engine.observability_config
        engine.engine_core.shutdown(timeout=0)


def test_no_limit_is_a_value_of_its_own():
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(top_p=None).max_tokens == 16


def test_the_most_completions_are_set_by_the_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_MAX_N_SEQUENCES", "3")
    assert SamplingParams(n=3).n == 3
    with pytest.raises(ValueError, match="an int from 1 to 3"):
        SamplingParams(n=4)


def test_the_constructor_shows_every_option():
    shown = inspect.signature(LLM).parameters
    assert {"model", "enable_multiprocessing", *options_of(EngineArgs)} == shown.keys()
    assert shown["max_logprobs"].default == 20 and "max_logprobs: Most logprobs" in (
        inspect.getdoc(LLM.__init__)
    )

    class Own(LLM):
        def __init__(self, folder):
            pass

    assert list(inspect.signature(Own).parameters) == ["folder"]


def test_functions_go_to_another_process_where_the_environment_allows_it(monkeypatch):
    llm = LLM(enable_multiprocessing=True, **SMALL)
    with llm, pytest.raises(ValueError, match="QUIRE_ALLOW_INSECURE_SERIALIZATION=1"):
        llm.apply_model(lambda model: 1)
    monkeypatch.setenv("QUIRE_ALLOW_INSECURE_SERIALIZATION", "1")
    with LLM(enable_multiprocessing=True, **SMALL) as llm:
        factor = 3
        assert llm.collective_rpc(lambda worker, n: factor * n, args=(5,)) == [15]
        [kind] = llm.apply_model(lambda model: type(model).__name__)
        assert isinstance(kind, str)
        with pytest.raises(Exception, match="no result"):
            llm.collective_rpc(_fail)


def _fail(worker):
    raise ValueError("no result")


def test_functions_are_refused_by_a_core_that_does_not_allow_them(monkeypatch):
    monkeypatch.setenv("QUIRE_ALLOW_INSECURE_SERIALIZATION", "1")
    frames = [bytes(frame) for frame in MessageEncoder().encode([len])]
    assert MessageDecoder(list).decode(frames) == [len]
    monkeypatch.delenv("QUIRE_ALLOW_INSECURE_SERIALIZATION")
    with pytest.raises(BadMessage, match="functions are refused"):
        MessageDecoder(list).decode(frames)
