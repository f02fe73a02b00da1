"""The synchronous engine: adding, stepping, aborting, pausing, counting."""

import logging
from types import SimpleNamespace

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.errors import CapacityError, EngineError, InvalidType, NotBuiltYet
from quire.observability.metrics import Counter, Gauge, Histogram
from quire.params import SamplingParams
from tests.engine.frontend.scripted_engines import make_engine, run


def test_outputs_carry_the_callers_id_and_prompt():
    engine = make_engine(lambda request: [10])
    internal = engine.add_request("mine", "a b", SamplingParams(max_tokens=1))
    shown = {"prompt_token_ids": [4, 5], "prompt": "shown"}
    engine.add_request("ids", shown, SamplingParams(max_tokens=1))
    first, second = run(engine)
    assert internal.startswith("mine-")
    assert (first.request_id, first.prompt) == ("mine", "a b")
    assert (second.request_id, second.prompt, second.prompt_token_ids) == ("ids", "shown", [4, 5])
    assert first.num_cached_tokens == 0


def test_request_ids_are_texts():
    with pytest.raises(TypeError) as caught:
        make_engine().add_request(3, "a", SamplingParams())
    assert isinstance(caught.value, InvalidType)
    assert str(caught.value) == "request_id=3 is not allowed: it must be a str."


def test_counting_what_is_unfinished():
    engine = make_engine(lambda request: [10, 11])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.add_request("r", [4], SamplingParams(max_tokens=2, n=3))
    assert engine.get_num_unfinished_requests() == 3
    assert engine.has_unfinished_requests()
    assert engine.has_unfinished_requests_dp(True)
    run(engine)
    assert engine.get_num_unfinished_requests() == 0


def test_a_stop_string_ends_the_request_in_the_core():
    engine = make_engine(lambda request: [10] * 5)
    text = engine.get_tokenizer().decode([10])
    engine.add_request("r", [4], SamplingParams(max_tokens=5, stop=[text]))
    (output,) = engine.step()
    assert (output.finished, output.outputs[0].stop_reason) == (True, text)
    assert engine.front_end.client.aborted == [0]
    assert not engine.has_unfinished_requests()


def test_a_request_is_added_whole_or_not_at_all(monkeypatch):
    engine = make_engine(lambda request: [10])
    client = engine.front_end.client
    add = client.add_request

    def full(request):
        if request.handle == 2:
            raise CapacityError("full")
        add(request)

    monkeypatch.setattr(client, "add_request", full)
    with pytest.raises(CapacityError):
        engine.add_request("r", [4], SamplingParams(n=3, max_tokens=1))
    assert not client.requests
    assert not engine.has_unfinished_requests()
    engine.add_request("s", [4], SamplingParams(max_tokens=1))
    assert [output.request_id for output in run(engine)] == ["s"]


def test_pausing_keeps_or_ends_what_there_is():
    engine = make_engine(lambda request: [10, 11])
    engine.add_request("kept", [4], SamplingParams(max_tokens=2))
    engine.step()
    engine.sleep(level=0, mode="keep")
    assert engine.is_sleeping()
    engine.add_request("queued", [4], SamplingParams(max_tokens=2))
    assert engine.step() == []
    assert engine.wake_up(tags=["weights"]) is False
    assert engine.wake_up(tags=["scheduling"]) is True
    engine.step()
    engine.sleep(level=0)
    (output,) = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("queued", "abort")
    assert engine.wake_up()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda e: e.add_lora("x"),
            InvalidType,
            "lora_request='x' is not allowed: it must be a LoRARequest.",
        ),
        (
            lambda e: e.get_metrics(),
            EngineError,
            "Statistics are off: make the engine with disable_log_stats=False.",
        ),
        (
            lambda e: LLMEngine(executor_class=dict),
            NotBuiltYet,
            "executor_class=<class 'dict'> is not allowed: this release does not implement "
            "it. Give executor_class_of(vllm_config) of quire.executor.backends, or leave it out.",
        ),
        (
            lambda e: LLMEngine(),
            InvalidType,
            "vllm_config=None is not allowed: it must be an EnginePlan.",
        ),
    ],
    ids=["add_lora", "get_metrics", "executor_class", "vllm_config"],
)
def test_refusals(call, error, text):
    with pytest.raises(error) as caught:
        call(make_engine())
    assert str(caught.value) == text


def test_no_tokenizer_is_said_so():
    with pytest.raises(EngineError, match="skip_tokenizer_init=True"):
        make_engine(tokenizer=None).get_tokenizer()


def test_remote_calls_reach_the_workers():
    engine = make_engine()
    assert engine.collective_rpc("name", args=[1], kwargs={"a": 2}) == [("name", (1,), {"a": 2})]
    assert engine.collective_rpc(lambda worker, x: x + 1, args=(2,)) == [3]
    assert engine.apply_model(len) == [("apply_model", (len,), {})]
    assert engine.reset_prefix_cache() is True
    assert engine.list_loras() == set()
    assert engine.get_supported_tasks() == ("generate",)
    engine.reset_mm_cache()
    engine.reset_encoder_cache()


def test_metrics_count(caplog):
    engine = make_engine(lambda request: [10, 11], log_stats=True)
    engine.add_request("a", [4, 5, 6], SamplingParams(max_tokens=2, n=2))
    engine.add_request("b", [4], SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    engine.abort_request("b")
    found = {
        (metric.name, metric.labels.get("finished_reason")): metric.value
        for metric in engine.get_metrics()
        if not isinstance(metric, Histogram)
    }
    assert found["vllm:prompt_tokens", None] == 7, "once for each completion"
    assert found["vllm:generation_tokens", None] == 6
    assert found["vllm:num_requests_running", None] == 3
    assert found["vllm:request_success", "length"] == 2
    assert found["vllm:request_success", "abort"] == 1
    assert found["vllm:request_success", "error"] == 0
    assert {type(metric) for metric in engine.get_metrics()} == {Counter, Gauge, Histogram}
    with caplog.at_level(logging.INFO):
        engine.do_log_stats()
        engine.do_log_stats_with_interval()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("running 3, waiting 0, KV 0.0 %, prefix hits 0.0 %")


@pytest.mark.parametrize(("policy", "warnings"), [("fcfs", 1), ("priority", 0)])
def test_priorities_without_their_policy_are_warned_of_once(policy, warnings, caplog):
    engine = make_engine(lambda request: [10])
    engine.front_end.plan = SimpleNamespace(
        steps=SimpleNamespace(scheduling_policy=policy),
        sampling=SimpleNamespace(hidden_states=None),
    )
    for number, priority in enumerate((0, 1, 2)):
        engine.add_request(str(number), [4], SamplingParams(max_tokens=1), priority=priority)
        assert ("no effect" in caplog.text) == bool(warnings and priority)
    assert caplog.text.count("scheduling_policy=priority") == warnings
    run(engine)


def test_closing_ends_everything():
    engine = make_engine(lambda request: [10])
    engine.add_request("r", [4], SamplingParams())
    engine.close()
    assert engine.front_end.client.is_shut_down
    assert engine.front_end.client.aborted == [0]
    assert engine.step() == []
