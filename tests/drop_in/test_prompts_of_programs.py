"""What programs pass to the offline faces, beside prompts and parameters."""

import gc
import logging
import threading
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from quire import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from quire.engine import EngineCoreRequest
from quire.engine.stats.loggers import StatLoggerBase
from quire.errors import (
    EngineError,
    InvalidParameter,
    NotBuiltYet,
    PromptTooLong,
    WeightMismatch,
)
from quire.executor.backends import executor_class_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
TEXT = "def add(first, second):\n    return first + second\n\n\ndef sub(first, second):\n"
CHAT = [{"role": "user", "content": "hello"}]
ARGS = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_model_len": 128}


@pytest.fixture(scope="module")
def llm():
    with LLM(**ARGS) as llm:
        yield llm


def finish(engine):
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output
    raise AssertionError("no output")


def prepared(engine, prompt=TEXT, **more):
    return engine.input_processor.process_inputs("mine", prompt, GREEDY, **more)


def test_a_request_that_was_processed_before_stands_for_its_prompt(llm):
    [wanted] = llm.generate(TEXT, GREEDY, use_tqdm=False)
    engine = llm.llm_engine
    request = prepared(engine, priority=3, data_parallel_rank=0, trace_headers={"a": "b"})
    assert isinstance(request, EngineCoreRequest)
    assert (request.request_id, request.priority) == ("mine", 3)
    assert (request.data_parallel_rank, request.trace_headers) == (0, {"a": "b"})
    internal = engine.add_request("another", request, SamplingParams(max_tokens=1))
    found = finish(engine)
    assert found.request_id == "mine" and internal.startswith("mine-"), "its own id rules"
    assert (found.prompt, found.prompt_token_ids) == (TEXT, wanted.prompt_token_ids)
    assert found.outputs == wanted.outputs


def test_requests_are_processed_by_the_reference_s_arguments(llm):
    engine = llm.llm_engine
    inputs, tasks = engine.input_processor, engine.get_supported_tasks()
    assert inputs.tokenizer is engine.tokenizer
    made = inputs.process_inputs(
        "r", TEXT, GREEDY, tasks, 5.0, None, None, None, 2, session_id=None
    )
    assert (made.arrival_time, made.priority) == (5.0, 2)
    for wrong in (("embed",), (), "generate", 5.0):
        with pytest.raises(InvalidParameter, match="supported_tasks"):
            inputs.process_inputs("r", TEXT, GREEDY, wrong)
    with pytest.raises(NotBuiltYet, match="session_id"):
        inputs.process_inputs("r", TEXT, GREEDY, session_id="s")
    with pytest.raises(TypeError, match="no_such_keyword"):
        inputs.process_inputs("r", TEXT, GREEDY, no_such_keyword=1)
    resumable = inputs.process_inputs("r", TEXT, GREEDY, resumable=True)
    with pytest.raises(NotBuiltYet, match="resumable"):
        engine.add_request("r", resumable, GREEDY)


def test_a_request_made_by_hand_stands_for_its_prompt(llm):
    ids = llm.get_tokenizer().encode(TEXT)
    [wanted] = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    made = EngineCoreRequest(request_id="r", prompt_token_ids=ids, params=GREEDY)
    llm.llm_engine.add_request("r", made, GREEDY, prompt_text="shown")
    found = finish(llm.llm_engine)
    assert found.prompt == "shown" and found.outputs == wanted.outputs


def test_what_goes_to_the_core_has_both_names(llm, monkeypatch):
    sent = []
    client = llm.llm_engine.engine_core
    monkeypatch.setattr(client, "add_request", sent.append)
    llm.llm_engine.add_request("r", "a", SamplingParams(n=2))
    llm.llm_engine.abort_request("r")
    assert [one.external_req_id for one in sent] == ["r", "r"]
    [first, second] = [one.request_id for one in sent]
    assert first.startswith("0_r-") and second == "1" + first[1:]


def test_prompt_text_goes_with_such_a_request_alone(llm):
    engine = llm.llm_engine
    with pytest.raises(InvalidParameter, match="goes with an EngineCoreRequest"):
        engine.add_request("r", "a", GREEDY, prompt_text="b")
    request = prepared(engine)
    request.external_req_id = "mine"
    with pytest.raises(InvalidParameter, match="external_req_id"):
        engine.add_request("r", request, GREEDY)
    assert not engine.has_unfinished_requests()


def test_prompts_are_truncated_to_their_last_tokens(llm):
    ids = llm.get_tokenizer().encode(TEXT)
    assert len(ids) > 20

    def shown(prompt, params=GREEDY, **kwargs):
        [output] = llm.generate(prompt, params, use_tqdm=False, tokenization_kwargs=kwargs or None)
        return output.prompt_token_ids

    bos = ids[:1]  # special tokens stay
    assert shown(TEXT, truncate_prompt_tokens=5) == bos + ids[-4:]
    assert shown(TEXT, truncate_prompt_tokens=5, truncation_side="right") == ids[:5]
    assert shown(ids, truncate_prompt_tokens=5) == ids[-5:]
    assert shown(ids, truncate_prompt_tokens=100) == ids
    asked = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=7)
    assert shown(TEXT, asked) == bos + ids[-6:]
    assert shown(TEXT, asked, truncate_prompt_tokens=3) == bos + ids[-2:]
    many = ids * 8
    with pytest.raises(PromptTooLong):
        shown(many)
    assert shown(many, truncate_prompt_tokens=-1) == many[-127:]
    for wrong in (-2, 1.5, "5"):
        with pytest.raises(InvalidParameter, match="truncate_prompt_tokens"):
            SamplingParams(truncate_prompt_tokens=wrong)
        with pytest.raises(InvalidParameter, match="truncate_prompt_tokens"):
            PoolingParams(truncate_prompt_tokens=wrong)
    with pytest.raises(InvalidParameter, match="truncate_prompt_tokens"):
        shown(TEXT, truncate_prompt_tokens=129)


def test_prompts_of_a_model_that_pools_are_truncated(llm):
    ids = llm.get_tokenizer().encode(TEXT)
    with LLM(runner="pooling", **ARGS) as pooler:
        params = PoolingParams(truncate_prompt_tokens=6)
        [cut] = pooler.embed(TEXT, use_tqdm=False, pooling_params=params)
        assert len(cut.prompt_token_ids) == 6
        [whole] = pooler.embed(TEXT, use_tqdm=False)
        assert whole.prompt_token_ids == ids
        [same] = pooler.embed({"prompt_token_ids": cut.prompt_token_ids}, use_tqdm=False)
        assert same.outputs.embedding == cut.outputs.embedding != whole.outputs.embedding


def test_chat_takes_its_parameters_in_their_places(llm):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ extra }}"
    given = (CHAT, GREEDY, False, None, template, "string", False, False, None, {"extra": "!"})
    [output] = llm.chat(*given)
    assert output.prompt == "<hello>!"
    ids = llm.enqueue_chat(*given)
    assert [each.outputs for each in llm.wait_for_completion(use_tqdm=False)] == [output.outputs]
    assert len(ids) == 1


def test_constructors_take_what_programs_pass():
    neutral = {
        "hf_token": False, "allowed_media_domains": [], "compilation_config": 3,
        "trust_remote_code": True, "optimization_level": 3,
    }  # fmt: skip
    args = AsyncEngineArgs(**{**ARGS, **neutral, "dtype": torch.float16})
    with LLM.from_engine_args(args) as llm:
        assert llm.llm_engine.vllm_config.model.dtype == "float16"
        assert llm.model_config.dtype is torch.float16
        assert llm.supported_tasks == ("generate",)
    EngineArgs(compilation_config={"mode": 3}).create_engine_config()
    args.enable_log_requests = True
    with pytest.raises(NotBuiltYet, match="enable_log_requests"):
        LLM.from_engine_args(args)
    with pytest.raises(NotBuiltYet, match="slow"):
        EngineArgs(tokenizer_mode="slow").create_engine_config()


def test_an_engine_shows_its_parts(llm):
    engine = llm.llm_engine
    assert engine.vllm_config is engine.front_end.plan
    assert engine.model_config == engine.vllm_config.model_config == llm.model_config
    assert engine.log_stats is False
    assert engine.engine_core.engine_core.executor is engine.model_executor
    assert engine.model_executor.driver_worker.get_model() is llm.apply_model(lambda m: m)[0]
    assert llm.input_processor is engine.input_processor
    assert engine.io_processor is None and not hasattr(engine, "renderer")
    with pytest.raises(AttributeError):
        engine.vllm_config = None


@pytest.mark.parametrize(
    "end",
    [
        lambda engine: delattr(engine, "model_executor"),
        lambda engine: engine.engine_core.shutdown(),
        lambda engine: engine.model_executor.shutdown(),
    ],
    ids=["del", "engine_core", "model_executor"],
)
def test_ways_in_which_programs_give_memory_back(end):
    llm = LLM(**ARGS)
    end(llm.llm_engine)
    llm.close()
    with pytest.raises(EngineError):
        llm.generate(TEXT, GREEDY, use_tqdm=False)


def test_the_client_of_the_core_passes_calls_to_workers(llm, tmp_path):
    client = llm.llm_engine.engine_core
    assert client.collective_rpc("kv_cache_bytes") == llm.collective_rpc("kv_cache_bytes")
    written = client.save_sharded_state(path=str(tmp_path), pattern=None, max_size=5 * 1024**3)
    assert [Path(name).parent for name in written] == [tmp_path]
    assert safetensors.torch.load_file(written[0])
    with pytest.raises(InvalidParameter, match="pattern"):
        client.save_sharded_state(path=str(tmp_path), pattern="model-pp-{pp_rank}")


def test_weights_that_a_program_would_put_into_a_model_have_to_be_the_model_s(llm):
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    with pytest.raises(WeightMismatch, match="a is not a weight of this model"):
        model.load_weights([("a", torch.ones(1))])


def test_a_time_limit_counts_the_wait_for_a_call_that_was_given_up(llm):
    may_end, has_ended = threading.Event(), []

    def slow(worker):
        may_end.wait(10)
        has_ended.append(worker.rank)

    for method in (slow, "check_health"):
        with pytest.raises(TimeoutError):
            llm.collective_rpc(method, timeout=0.05)
    assert not has_ended, "the second call did not wait for the first one"
    may_end.set()
    assert llm.collective_rpc("check_health") == [None] and has_ended == [0]


def test_what_each_level_of_sleep_gives_back(llm):
    [whole] = llm.collective_rpc("kv_cache_bytes")
    for level, kept in ((0, whole), (1, 0), (2, 0)):
        llm.sleep(level)
        assert llm.collective_rpc("kv_cache_bytes") == [kept]
        assert llm.wake_up() is True
    assert llm.collective_rpc("kv_cache_bytes") == [whole] and whole > 0


def test_keywords_of_requests_that_are_not_built_are_named(llm):
    with pytest.raises(NotBuiltYet, match="session_id"):
        llm.llm_engine.add_request("r", "a", GREEDY, session_id="s")
    with pytest.raises(TypeError, match="no_such_keyword"):
        llm.llm_engine.add_request("r", "a", GREEDY, no_such_keyword=None)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_call_that_takes_too_long_is_given_up(llm):
    done = []

    def slow(worker, seconds):
        time.sleep(seconds)
        done.append(seconds)
        return seconds

    assert llm.collective_rpc(slow, timeout=60, args=(0,)) == [0]
    with pytest.raises(TimeoutError, match=r"collective_rpc was not answered within 0\.05 s"):
        llm.collective_rpc(slow, timeout=0.05, args=(0.4,))
    assert done == [0]
    assert len(llm.generate(TEXT, GREEDY, use_tqdm=False)) == 1
    assert done == [0, 0.4], "the next call waits for the one before"
    with pytest.raises(ZeroDivisionError):
        llm.collective_rpc(lambda worker: 1 / 0, timeout=60)


@pytest.mark.parametrize("is_kept", [True, False])
def test_statistics_are_as_the_call_says(is_kept):
    plan = EngineArgs(**ARGS, disable_log_stats=is_kept).create_engine_config()
    engine = LLMEngine.from_vllm_config(plan, disable_log_stats=not is_kept)
    try:
        assert engine.log_stats is is_kept
        engine.add_request("r", TEXT, GREEDY)
        output = finish(engine)
        assert (output.metrics is not None) is is_kept
        if is_kept:
            assert engine.get_metrics()
        else:
            with pytest.raises(EngineError, match="Statistics are off"):
                engine.get_metrics()
    finally:
        engine.close()


def test_loggers_hear_of_sleep_as_the_reference_tells_it():
    class Recorder(StatLoggerBase):
        heard = []

        def __init__(self, vllm_config, engine_index=0): ...
        def record(self, *stats, **more): ...
        def log_engine_initialized(self): ...

        def record_sleep_state(self, is_awake, level):
            self.heard.append((is_awake, level))

    args = EngineArgs(**ARGS, disable_log_stats=True)
    engine = LLMEngine.from_engine_args(args, stat_loggers=[Recorder])
    try:
        engine.sleep(0)
        engine.release_kv_cache_memory()
        engine.wake_up()
        engine.sleep(1)
        assert engine.wake_up(["weights"]) is False
        assert engine.wake_up(["kv_cache"]) is True
    finally:
        engine.close()
    assert Recorder.heard == [(1, 0), (1, 0), (0, 0), (1, 1), (0, 0)]


def test_steps_log_their_line(monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0.000001")
    plan = EngineArgs(**ARGS).create_engine_config()
    engine = LLMEngine(plan, executor_class_of(plan), True)
    try:
        engine.add_request("r", TEXT, GREEDY)
        with caplog.at_level(logging.INFO, "quire.engine.stats.loggers"):
            finish(engine)
        assert any("generation" in line and "tokens/s" in line for line in caplog.messages)
    finally:
        engine.close()


@pytest.mark.full
def test_an_engine_that_nothing_refers_to_ends_its_core():
    before = set(psutil.Process().children())
    engine = LLMEngine.from_engine_args(EngineArgs(**ARGS), enable_multiprocessing=True)
    cores = set(psutil.Process().children()) - before
    assert cores
    with pytest.raises(AttributeError, match="another process"):
        _ = engine.model_executor
    del engine
    gc.collect()
    _, alive = psutil.wait_procs(cores, timeout=30)
    assert not alive
