"""The messages of `quire.engine` are made and read by the fields that the reference documents."""

import dataclasses

import msgspec
import numpy as np
import pytest

from quire import LLM, PoolingParams, SamplingParams
from quire.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    UtilityOutput,
)
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.lora.request import LoRARequest
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.step.columns import LogprobColumns, PromptLogprobs
from tests.engine.frontend.scripted_engines import make_engine, run

PARAMS = SamplingParams(temperature=0.0, max_tokens=9)
KIND = EngineCoreEventType

OF_A_REQUEST = {
    "request_id": "r", "prompt_token_ids": [3, 4], "mm_features": None, "sampling_params": PARAMS,
    "pooling_params": None, "arrival_time": 5.0, "lora_request": None, "cache_salt": None,
    "data_parallel_rank": None, "prompt_embeds": None, "prompt_is_token_ids": None,
    "client_index": 0, "current_wave": 0, "priority": 0, "trace_headers": None,
    "resumable": False, "external_req_id": None, "reasoning_ended": None,
    "reasoning_parser_kwargs": None, "abort_immediately": False, "session_id": None,
    "kv_hints": None,
}  # fmt: skip
"""Every field of the reference, in its order, at values that say nothing."""


def logprobs(rows, width, first=0):
    """Of the ids from `first` on, one column after the other."""
    ids = first + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    values, ranks = -ids.astype(np.float32), np.arange(rows, dtype=np.int32)
    return LogprobColumns([*range(rows)], ids, values, ranks, [width] * rows)


# requests


def test_a_request_is_made_of_the_reference_s_fields():
    wanted = EngineCoreRequest(
        request_id="r", prompt_token_ids=[3, 4], params=PARAMS, arrival_time=5.0
    )
    assert EngineCoreRequest(**OF_A_REQUEST) == wanted
    assert EngineCoreRequest("r", [3, 4], None, PARAMS, None, 5.0, None, None, None) == wanted
    older = {**OF_A_REQUEST, "eos_token_id": None}
    for newer in ("abort_immediately", "session_id", "kv_hints", "resumable"):
        del older[newer]
    assert EngineCoreRequest(**older) == wanted


@pytest.mark.parametrize("name", OF_A_REQUEST)
def test_a_request_shows_what_it_was_made_of(name):
    headers = {"traceparent": "x"}
    adapter = LoRARequest("a", 7, "/adapters/a")
    more = {"priority": 4, "cache_salt": "s", "data_parallel_rank": 1, "lora_request": adapter}
    given = {**OF_A_REQUEST, **more, "trace_headers": headers, "external_req_id": "e"}
    made = EngineCoreRequest(**given)
    if name == "current_wave":
        with pytest.raises(AttributeError, match="carries no wave"):
            _ = made.current_wave
    elif hasattr(made, name) or given[name]:
        assert getattr(made, name) == given[name]
    assert made.lora_request.lora_path == "/adapters/a"
    assert made.params is PARAMS and made.trace_headers is not headers


def test_a_pooling_request():
    params = PoolingParams(task="embed")
    made = EngineCoreRequest(**OF_A_REQUEST | {"sampling_params": None, "pooling_params": params})
    assert made.pooling_params is made.params is params and made.sampling_params is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_features", [object()]), ("prompt_embeds", np.ones((2, 3))),
        ("prompt_is_token_ids", [True, False]), ("client_index", 1), ("current_wave", 2),
        ("abort_immediately", True), ("session_id", "s"), ("kv_hints", {"a": 1}),
        ("reasoning_ended", False), ("reasoning_parser_kwargs", {}), ("eos_token_id", 0),
    ],
)  # fmt: skip
def test_what_a_request_cannot_have_is_named(name, value):
    with pytest.raises(NotBuiltYet, match=rf"(?s){name}=.*release does not implement it\. \w+"):
        EngineCoreRequest(**OF_A_REQUEST | {name: value})


def test_a_request_has_parameters_of_one_kind():
    for wrong in ({"sampling_params": None}, {"pooling_params": PoolingParams()}):
        with pytest.raises(InvalidParameter, match="sampling_params or pooling_params"):
            EngineCoreRequest(**OF_A_REQUEST | wrong)
    with pytest.raises(InvalidParameter, match="prompt_token_ids"):
        EngineCoreRequest(**OF_A_REQUEST | {"prompt_token_ids": None})
    with pytest.raises(TypeError, match="no_such_field"):
        EngineCoreRequest(**OF_A_REQUEST, no_such_field=None)
    with pytest.raises(TypeError, match="no_such_field"):
        EngineCoreRequest(handle=3, no_such_field=None)


def test_a_made_request_stands_for_a_prompt():
    with LLM(dtype="float32", num_gpu_blocks_override=100, max_model_len=128) as llm:
        ids = llm.get_tokenizer().encode("def add(a, b):")
        [wanted] = llm.generate({"prompt_token_ids": ids}, PARAMS, use_tqdm=False)
        made = EngineCoreRequest(**OF_A_REQUEST | {"prompt_token_ids": ids, "arrival_time": 0.0})
        llm.llm_engine.add_request("other", made, PARAMS)
        [found] = run(llm.llm_engine)[-1:]
        assert (found.request_id, found.outputs) == ("r", wanted.outputs)
        adapter = LoRARequest("a", 7, "/adapters/a")
        with pytest.raises(ValueError, match="LoRA is not enabled"):
            given = OF_A_REQUEST | {"lora_request": adapter}
            llm.llm_engine.add_request("r", EngineCoreRequest(**given), PARAMS)
        with pytest.raises(NotBuiltYet, match="resumable"):
            given = OF_A_REQUEST | {"resumable": True}
            llm.llm_engine.add_request("r", EngineCoreRequest(**given), PARAMS)
        assert not llm.llm_engine.has_unfinished_requests()


def test_requests_that_are_processed_before_keep_what_they_ask_for(monkeypatch):
    engine, sent = make_engine(max_model_len=64), []
    inputs = engine.input_processor
    inputs.limits = dataclasses.replace(inputs.limits, serves_adapters=True)
    monkeypatch.setattr(engine.engine_core, "add_request", sent.append)
    adapter = LoRARequest("a", 7, "/adapters/a")
    request = inputs.process_inputs(
        "r", [4, 5], SamplingParams(n=2), lora_request=adapter, data_parallel_rank=0
    )
    engine.add_request("other", request, request.params)
    assert [one.lora_request for one in sent] == [adapter, adapter]
    assert [one.adapter.folder for one in sent] == ["/adapters/a"] * 2
    assert [one.data_parallel_rank for one in sent] == [0, 0], "every completion goes there"


# outputs


def made_outputs():
    asked = logprobs(2, 3)
    asked = PromptLogprobs(0, asked.token_ids, asked.values, asked.ranks)
    return [
        EngineCoreOutput(
            "r-1", [5, 6], logprobs(2, 2, 40), new_prompt_logprobs_tensors=asked,
            events=[EngineCoreEvent(KIND.QUEUED, 1.0), EngineCoreEvent(KIND.SCHEDULED, 2.0)],
            num_cached_tokens=16, prompt_token_id_logprobs=np.zeros((1, 2), np.float32),
        ),
        EngineCoreOutput(request_id="12", new_token_ids=[7], new_logprobs=logprobs(1, 4, 90)),
        EngineCoreOutput(
            request_id="x", new_token_ids=[8], finish_reason=FinishReason.STOP, stop_reason=8,
            events=[EngineCoreEvent(KIND.PREEMPTED, 3.0), EngineCoreEvent(KIND.PREEMPTED, 4.0)],
            routed_experts=np.ones((1, 2, 2), np.int16),
        ),
        EngineCoreOutput(
            request_id="pooled", new_token_ids=[], pooling_output=np.ones(4, np.float32),
            finish_reason=FinishReason.STOP,
        ),
        EngineCoreOutput(
            request_id="spoiled", new_token_ids=[], finish_reason=FinishReason.ERROR,
            num_nans_in_logits=9,
        ),
    ]  # fmt: skip


def shown(output):
    fields = {name: getattr(output, name) for name in output.__slots__}
    fields["events"] = fields["events"] or []
    for name in ("new_logprobs", "new_prompt_logprobs_tensors"):
        if fields[name] is not None:
            columns = msgspec.structs.asdict(fields[name])
            columns.pop("handle", None)
            valid = slice(None, max(columns.pop("counts", [None])))
            fields[name] = {
                key: value[:, valid].tolist() if getattr(value, "ndim", 0) == 2 else list(value)
                for key, value in columns.items()
            }
    for name in ("pooling_output", "routed_experts", "prompt_token_id_logprobs"):
        fields[name] = None if fields[name] is None else fields[name].tolist()
    return fields


def test_nans_come_with_the_error_that_they_cause():
    going_on = EngineCoreOutput(request_id="r", new_token_ids=[3], num_nans_in_logits=2)
    with pytest.raises(InvalidParameter, match="num_nans_in_logits=2"):
        EngineCoreOutputs(outputs=[going_on])


def test_outputs_show_what_they_were_made_of():
    stats = SchedulerStats(num_running_reqs=3)
    made = EngineCoreOutputs(
        engine_index=2, outputs=made_outputs(), scheduler_stats=stats, timestamp=7.5,
        finished_requests={"x", "gone", "pooled", "spoiled"}, wave_complete=1,
    )  # fmt: skip
    [gone] = made.outputs[5:]
    assert (gone.request_id, gone.finish_reason) == ("gone", FinishReason.ABORT)
    assert list(map(shown, made.outputs[:5])) == list(map(shown, made_outputs()))
    assert made.scheduler_stats is stats and made.finished_requests == {
        "x",
        "gone",
        "pooled",
        "spoiled",
    }
    assert (made.engine_index, made.timestamp, made.wave_complete) == (2, 7.5, 1)
    frames = [bytes(frame) for frame in MessageEncoder().encode(made)]
    arrived = MessageDecoder(EngineCoreOutputs).decode(frames)
    assert list(map(shown, arrived.outputs)) == list(map(shown, made.outputs))


def test_messages_say_when_they_were_made():
    first, second = (EngineCoreOutputs(outputs=[]) for _ in range(2))
    assert 0 < first.timestamp <= second.timestamp
    assert first.outputs == [] and first.finished_requests is None


def test_what_an_output_cannot_have_is_named():
    for name in ("prefill_stats", "new_sampling_mask", "trace_headers"):
        with pytest.raises(NotBuiltYet, match=name):
            EngineCoreOutput("r", [1], **{name: {"a": 1}})
        assert getattr(EngineCoreOutput("r", [1], **{name: None}), name) is None
    kept = EngineCoreOutput("r", [1], kv_transfer_params={"a": 1})
    assert EngineCoreOutputs(outputs=[kept]).outputs[0].kv_transfer_params == {"a": 1}
    with pytest.raises(InvalidType, match="new_logprobs"):
        EngineCoreOutput("r", [1], new_logprobs=([1], [0.5]))
    with pytest.raises(InvalidType, match="request_id"):
        EngineCoreOutput(5, [1])
    for events in ([KIND.PREEMPTED], [KIND.QUEUED], [KIND.QUEUED, KIND.SCHEDULED, KIND.QUEUED]):
        output = EngineCoreOutput("r", [1], events=[EngineCoreEvent(kind, 1.0) for kind in events])
        with pytest.raises(InvalidParameter, match="events"):
            EngineCoreOutputs(outputs=[output])
    with pytest.raises(TypeError, match="no_such_field"):
        EngineCoreOutputs(outputs=[], no_such_field=1)


def test_a_core_that_somebody_else_wrote(monkeypatch):
    """It knows requests and outputs by the reference's names alone."""
    engine, sent, step = make_engine(max_model_len=64), [], iter(range(3))

    def get_output():
        end = FinishReason.LENGTH if next(step) == 2 else None
        outputs = [
            EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[20 + place, 30],
                new_logprobs=logprobs(2, 1, 20), finish_reason=end, num_cached_tokens=5,
            )
            for place, request in enumerate(sent)
        ]  # fmt: skip
        unknown = EngineCoreOutput(request_id="unknown", new_token_ids=[1])
        finished = {request.request_id for request in sent} if end is not None else None
        return EngineCoreOutputs(outputs=[unknown, *outputs], finished_requests=finished)

    monkeypatch.setattr(engine.engine_core, "add_request", sent.append)
    monkeypatch.setattr(engine.engine_core, "get_output", get_output)
    asked = SamplingParams(n=2, logprobs=0, max_tokens=6)
    engine.add_request("0_crowd", [4, 5], asked)
    engine.add_request("alone", [4, 5, 6], SamplingParams(max_tokens=6))
    outputs = run(engine)
    ends = {
        (output.request_id, one.index): one
        for output in outputs for one in output.outputs if one.finished()
    }  # fmt: skip
    wanted = {("0_crowd", 0): [20, 30], ("0_crowd", 1): [21, 30], ("alone", 0): [22, 30]}
    assert {key: list(one.token_ids) for key, one in ends.items()} == {
        key: ids * 3 for key, ids in wanted.items()
    }
    assert {one.finish_reason for one in ends.values()} == {"length"}
    assert {output.num_cached_tokens for output in outputs} == {5}
    assert [*ends["0_crowd", 1].logprobs[1]] == [21]


def test_the_answer_to_a_call():
    output = UtilityOutput(call_id=4, failure_message="no")
    made = EngineCoreOutputs(utility_output=output)
    assert (made.utility_output.call_id, made.utility_output.result) == (4, None)
