"""`AsyncLLM` on the embedded model: the texts of `LLM`, streamed prompts, sleep in between."""

import asyncio
import decimal

import pytest

from quire import LLM, SamplingParams
from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.inproc import build_client
from quire.engine.frontend.frontend import build_front_end
from quire.engine.frontend.streaming_input import StreamingInput
from quire.engine.stats.loggers import StatLoggerBase
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import RequestError
from quire.params import RequestOutputKind
from quire.testing.loop_client import LoopClient

PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self"]
WISHES = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_bytes": 2**25}
SCRIPT = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, logprobs=2),
    SamplingParams(temperature=1.0, n=3, max_tokens=24, stop=["\n\n"], presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def plan():
    return EngineArgs(**WISHES).create_engine_config()


@pytest.fixture(scope="module")
def right():
    with LLM(**WISHES) as llm:
        yield [texts(llm.generate(PROMPTS, params, use_tqdm=False)) for params in SCRIPT]


def texts(outputs):
    return [[(c.text, list(c.token_ids), c.finish_reason) for c in o.outputs] for o in outputs]


def serve(plan, use):
    async def runs():
        inner = build_client(plan)
        client = LoopClient(inner, lambda: inner.engine_core.has_work)
        engine = AsyncLLM(plan, front_end=build_front_end(plan, client), log_requests=False)
        try:
            return await asyncio.wait_for(use(engine), 120)
        finally:
            engine.shutdown()

    return asyncio.run(runs())


async def last(engine, prompt, params, request_id):
    own = params.clone()
    own.output_kind = RequestOutputKind.FINAL_ONLY
    [output] = [output async for output in engine.generate(prompt, own, request_id)]
    return output


def test_the_same_script_gives_the_same_texts(plan, right):
    async def use(engine):
        found = []
        for round_, params in enumerate(SCRIPT):
            # seeds are drawn in the order of arrival, as in LLM
            tasks = [
                asyncio.create_task(last(engine, prompt, params, f"{round_}-{i}"))
                for i, prompt in enumerate(PROMPTS)
            ]
            found.append(texts(await asyncio.gather(*tasks)))
        return found

    assert serve(plan, use) == right


@pytest.mark.parametrize("level", [0, 1, 2])
def test_streams_sleep_and_go_on(plan, right, level):
    async def use(engine):
        params = SCRIPT[0].clone()
        params.output_kind = RequestOutputKind.DELTA
        streams = [engine.generate(p, params, f"{i}") for i, p in enumerate(PROMPTS)]
        heads = await asyncio.gather(*(anext(stream) for stream in streams))
        await engine.sleep(level, "keep")
        assert await engine.is_sleeping()
        assert await engine.wake_up() is True
        found = []
        for head, stream in zip(heads, streams, strict=True):
            outputs = [head, *[output async for output in stream]]
            found.append("".join(output.outputs[0].text for output in outputs))
        return found

    assert serve(plan, use) == [completions[0][0] for completions in right[0]]


def test_a_streamed_prompt_is_answered_part_by_part(plan):
    """Each answer is what the whole text so far, less the unread last token, is answered with."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    more = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

    async def use(engine):
        tokenizer = engine.get_tokenizer()
        first, second = (tokenizer.encode(prompt) for prompt in PROMPTS[:2])

        async def parts():
            yield StreamingInput(first)
            yield StreamingInput(second, more)

        streamed = []
        stream_params = params.clone()
        stream_params.output_kind = RequestOutputKind.DELTA
        async for output in engine.generate(parts(), stream_params, "streamed"):
            streamed += output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        alone = (await last(engine, first, params, "a")).outputs[0].token_ids
        whole = [*first, *alone[:-1], *second]
        answer = (await last(engine, whole, more, "b")).outputs[0].token_ids
        return streamed, [*alone, *answer]

    streamed, expected = serve(plan, use)
    assert len(expected) == 15
    assert streamed == expected


def test_an_engine_in_processes_serves_counts_and_ends(right):
    class Recorder(StatLoggerBase):
        heard = []

        def __init__(self, vllm_config, engine_index=0):
            assert vllm_config.serving.log_stats

        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
            self.heard.append(iteration_stats.num_generation_tokens)

        def log_engine_initialized(self):
            self.heard.append("initialized")

    async def runs():
        args = AsyncEngineArgs(**WISHES, disable_log_stats=True)
        engine = AsyncLLM.from_engine_args(args, stat_loggers=[Recorder])
        try:
            tasks = [last(engine, p, SCRIPT[0], f"{i}") for i, p in enumerate(PROMPTS)]
            found = texts(await asyncio.gather(*tasks))
            assert engine.is_alive() and engine.is_ready()
            queued = [m for m in engine.get_metrics() if m.name.endswith("queue_time_seconds")]
            assert [metric.count for metric in queued] == [len(PROMPTS)]
            with pytest.raises(RequestError, match="timeout_s=-1 is not allowed"):
                await anext(engine.generate(PROMPTS[0], SCRIPT[0], "late", timeout_s=-1))
            long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            stream = engine.generate(PROMPTS[0], long, "late", timeout_s=1e-3)
            ended = [output async for output in stream][-1].outputs[0]
            assert (ended.finish_reason, ended.stop_reason) == ("abort", "timeout")
            await engine.wait_for_requests_to_drain(60)
            return found
        finally:
            engine.shutdown()

    assert asyncio.run(asyncio.wait_for(runs(), 120)) == right[0]
    assert Recorder.heard[0] == "initialized"
    assert sum(Recorder.heard[1:]) >= sum(len(text[0][1]) for text in right[0])


HOSTILE = [
    {"arrival_time": "x"}, {"arrival_time": [1]}, {"arrival_time": decimal.Decimal(1)},
    {"arrival_time": float("nan")}, {"arrival_time": -1.0}, {"data_parallel_rank": 0.0},
    {"data_parallel_rank": False}, {"data_parallel_rank": 7}, {"priority": 1.5}, {"priority": True},
    {"timeout_s": "x"}, {"trace_headers": ["x"]}, {"tokenization_kwargs": 5},
]  # fmt: skip


def test_a_caller_s_mistake_costs_nobody_else_anything(right):
    """Over two cores in processes: none dies, and every other stream is as it would have been."""

    async def main():
        args = AsyncEngineArgs(**WISHES, data_parallel_size=2, scheduling_policy="priority")
        engine = AsyncLLM.from_engine_args(args)
        client = engine.front_end.client
        pids = [client.core_status(index).pid for index in (0, 1)]
        try:
            tasks = [
                asyncio.create_task(last(engine, prompt, SCRIPT[0], f"{i}"))
                for i, prompt in enumerate(PROMPTS)
            ]
            for named in HOSTILE:
                [name] = named
                with pytest.raises(RequestError, match=f"^{name}="):
                    await engine.add_request("bad", [4], SCRIPT[0], **named)
            for value in (object(), "\ud800", 2**70):
                extra = SamplingParams(extra_args={"a": 1})
                extra.extra_args["a"] = value
                with pytest.raises(RequestError, match=r"^extra_args="):
                    await engine.add_request("bad", [4], extra)
            with pytest.raises(RequestError, match="request_id="):
                await engine.add_request("\ud800", [4], SCRIPT[0])
            for index, rank in enumerate((0, 1)):
                request = EngineCoreRequest(1 << 41 | index, [4], SCRIPT[0], arrival_time="x")
                request.data_parallel_rank = rank
                client.add_request(request)  # as no front end makes it
            assert texts(await asyncio.gather(*tasks)) == right[0]
            assert engine.get_num_unfinished_requests() == 0
            assert [client.core_status(index).pid for index in (0, 1)] == pids
            while client.supervisor.has_requests:  # their errors are on the way
                await asyncio.sleep(0.01)
            assert client.num_restarts == 0
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 240))
