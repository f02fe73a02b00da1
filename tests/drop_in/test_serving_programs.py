"""`AsyncLLM` as programs written for the reference use it, over cores in processes."""

import asyncio
import contextlib
import gc
import logging
import os
import weakref

import psutil
import pytest

from quire import AsyncEngineArgs, AsyncLLM, LLMEngine, SamplingParams
from quire.as_vllm.stand_ins import ExecutorChoice
from quire.engine.arguments import check_clients
from quire.errors import EngineDeadError, NotBuiltYet
from quire.executor.backends import executor_class_of
from tests.engine.frontend.async_engines import collect, looped, make_async

ARGS = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_model_len": 256}
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


def launch(**more):
    plan = AsyncEngineArgs(**ARGS).create_engine_config()
    return AsyncLLM(plan, executor_class_of(plan), True, usage_context="api server", **more)


async def value_of(engine, name, wanted, **labels):
    for _ in range(3000):
        found = [
            metric.value for metric in engine.get_metrics()
            if metric.name == f"vllm:{name}" and labels.items() <= metric.labels.items()
        ]  # fmt: skip
        if found == [wanted]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is {found}")


@contextlib.contextmanager
def stopped(pid):
    process = psutil.Process(pid)
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            os.sched_yield()
        yield
    finally:
        process.resume()


@looped
async def test_a_life():
    """One engine for what needs real cores: requests are slow to start."""
    engine = launch()
    assert engine.get_tokenizer() is engine.tokenizer
    assert (
        engine.vllm_config.model_config.get_vocab_size() == engine.front_end.plan.model.vocab_size
    )
    prepared = engine.input_processor.process_inputs("own", "def f(", LONG)
    outputs = [output async for output in engine.generate(prepared, LONG, "given")]
    assert (outputs[-1].request_id, outputs[-1].prompt) == ("own", "def f(")
    with stopped(engine.front_end.client.core_status(0).pid), pytest.raises(TimeoutError):
        await engine.collective_rpc("kv_cache_bytes", timeout=1e-9)
    assert len(await engine.collective_rpc("kv_cache_bytes", timeout=60)) == 1

    await engine.pause_generation("keep", clear_cache=False)
    waiting = [asyncio.create_task(collect(engine, f"w{i}", max_tokens=2)) for i in range(3)]
    await value_of(engine, "num_requests_waiting", 3)
    await value_of(engine, "num_requests_waiting_by_reason", 3, reason="capacity")
    await value_of(engine, "num_requests_waiting_by_reason", 0, reason="deferred")
    await engine.abort("w0")
    await value_of(engine, "num_requests_waiting", 2)
    await engine.resume_generation()
    await asyncio.gather(*waiting)

    streams = [asyncio.create_task(collect(engine, f"s{i}", max_tokens=100)) for i in range(3)]
    await value_of(engine, "num_requests_running", 3)
    engine.shutdown(60)
    for outputs in await asyncio.gather(*streams):
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason in ("stop", "length")
    with pytest.raises(EngineDeadError):
        await collect(engine, "late")


@pytest.mark.parametrize("is_kept", [True, False])
@looped
async def test_statistics_are_as_the_call_says(monkeypatch, is_kept):
    """Whatever the plan says, in the constructor and in `from_vllm_config`."""
    made = []

    def launched(plan, stat_loggers, is_log_aggregated):
        made.append(plan.serving.log_stats)
        return make_async(log_stats=plan.serving.log_stats).front_end

    monkeypatch.setattr("quire.engine.async_llm.launch_async_front_end", launched)
    plan = AsyncEngineArgs(**ARGS, disable_log_stats=is_kept).create_engine_config()
    for engine in (
        AsyncLLM(plan, None, is_kept),
        AsyncLLM.from_vllm_config(plan, disable_log_stats=not is_kept),
    ):
        assert engine.log_stats is is_kept
        [*_, last] = await collect(engine, "r", max_tokens=2)
        assert (last.metrics is not None) is is_kept
        engine.shutdown()
    assert made == [is_kept, is_kept]


@looped
async def test_a_request_that_was_processed_before_can_be_added():
    engine = make_async()
    prepared = engine.input_processor.process_inputs("own", "def f(", SamplingParams(max_tokens=2))
    mailbox = await engine.add_request("given", prepared, prepared.params, prompt_text="shown")
    output = await mailbox.get()
    assert (output.request_id, output.prompt) == ("own", "shown")
    with pytest.raises(ValueError, match="goes with an EngineCoreRequest"):
        await engine.add_request("r", [4], SamplingParams(), prompt_text="shown")


def test_an_executor_of_somebody_else_is_refused():
    plan = AsyncEngineArgs(**ARGS).create_engine_config()
    own = executor_class_of(plan)
    assert ExecutorChoice.get_class(plan) is own
    for other in (type("Mine", (own,), {}), ExecutorChoice, "ray", own.__name__):
        for kind in (AsyncLLM, LLMEngine):
            with pytest.raises(NotBuiltYet, match=r"executor_class=.* Give executor_class_of"):
                kind(plan, other, False)


@looped
async def test_requests_that_do_not_finish_in_time_end_by_an_error():
    engine = make_async(lambda request: [10])  # stands still after a token
    stream = asyncio.create_task(collect(engine, "r", max_tokens=9))
    await asyncio.sleep(0.05)
    engine.shutdown(0.05)
    with pytest.raises(EngineDeadError, match="shut down"):
        await stream


@looped
async def test_a_drain_says_how_many_are_left():
    engine = make_async(lambda request: [10])
    streams = [asyncio.create_task(collect(engine, f"r{i}", max_tokens=9)) for i in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"2 requests were not finished after 0\.05 s"):
        await engine.wait_for_requests_to_drain(0.05)
    await engine.abort(["r0", "r1"])
    await asyncio.gather(*streams)
    await engine.wait_for_requests_to_drain(0.05)


@looped
async def test_ends_are_logged_where_requests_are(caplog):
    engine = make_async(lambda request: [10])
    engine._log_requests = True
    with caplog.at_level(logging.INFO, "quire.engine.async_llm"):
        stream = asyncio.create_task(collect(engine, "one", max_tokens=9))
        await asyncio.sleep(0.05)
        await engine.abort("one")
        await stream
        left = engine.generate([4], SamplingParams(max_tokens=9), "two")
        await anext(left)
        await left.aclose()
        with pytest.raises(ValueError, match="prompt"):
            await collect(engine, "three", prompt=())
        await collect(engine, "four", max_tokens=1)
    found = [line for line in caplog.messages if not line.startswith("Added")]
    assert found[0] == "Aborted request(s) one."
    assert found[1].startswith("Request two was aborted")
    assert found[2].startswith("Request three failed: ") and "prompt" in found[2]
    assert len(found) == 3


def test_an_engine_that_nothing_refers_to_is_shut_down():
    async def leave():
        engine = make_async()
        await collect(engine, "r", max_tokens=2)
        return weakref.ref(engine), engine.front_end.client.inner

    engine, core = asyncio.run(leave())
    gc.collect()
    assert engine() is None and core.is_shut_down


def test_it_is_shut_down_while_its_event_loop_goes_on():
    async def main():
        engine = make_async()
        await collect(engine, "r", max_tokens=2)
        core, found = engine.front_end.client.inner, weakref.ref(engine)
        handler, watch = engine._handler, engine._loop_watch
        del engine
        gc.collect()
        assert found() is None and core.is_shut_down
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(handler, 10)
        assert watch._is_over.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("given", [(["ipc://x"], 1, 0), (None, 2, 0), (None, 1, 1)], ids=str)
def test_an_engine_has_one_client(given):
    with pytest.raises(NotBuiltYet, match=r"client_.*api-server-count"):
        check_clients(*given)
    check_clients(None, 1, 0)
    with pytest.raises(NotBuiltYet, match="client_"):
        AsyncLLM(None, None, True, None, None, False, True, True, None, False, *given)
