"""AsyncLLM: the texts of LLMEngine, slow and vanishing consumers, aborts at every moment, limits,
deadlines, death.
"""

import asyncio

import pytest

from quire.engine.frontend.streaming_input import StreamingInput
from quire.errors import (
    EngineDeadError,
    EngineError,
    InputStreamError,
    InvalidParameter,
    InvalidType,
    MaxQueuedTokensError,
    QueueOverflowError,
    RequestError,
)
from quire.lora.request import LoRARequest
from quire.params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.engine.frontend.async_engines import collect, core_of, looped, make_async
from tests.engine.frontend.scripted_engines import make_engine, run, whole

KINDS = list(RequestOutputKind)
TOKENS = list(range(10, 60))


def assert_nothing_left(engine):
    outputs = engine.front_end.outputs
    assert outputs.num_unfinished == 0 and outputs.num_queued_tokens == 0
    assert not outputs._groups and not outputs._by_name
    assert not core_of(engine).requests


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 3])
@looped
async def test_the_outputs_are_those_of_llm_engine(kind, n):
    wishes = {"n": n, "max_tokens": 20, "logprobs": 2, "output_kind": kind, "stop": ["zz"]}
    sync = make_engine(lambda request: TOKENS)
    sync.add_request("r", [4, 5], SamplingParams(**wishes))
    expected = whole(run(sync), kind)
    engine = make_async(lambda request: TOKENS)
    outputs = await collect(engine, "r", (4, 5), **wishes)
    assert whole(outputs, kind) == expected
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert_nothing_left(engine)


@looped
async def test_many_at_once_each_get_their_own():
    engine = make_async(lambda request: [request.prompt_token_ids[0] + i for i in range(30)])
    outputs = await asyncio.gather(
        *(
            collect(engine, f"r{i}", (i + 20,), max_tokens=i + 1, output_kind=KINDS[i % 3])
            for i in range(30)
        )
    )
    for i, own in enumerate(outputs):
        found = whole(own, KINDS[i % 3])
        assert found[f"r{i}", 0][1] == [i + 20 + k for k in range(i + 1)]
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@looped
async def test_what_a_slow_consumer_missed_comes_as_one_output(kind):
    engine = make_async(lambda request: TOKENS)
    params = SamplingParams(max_tokens=50, output_kind=kind)
    stream = engine.generate([4], params, "slow")
    first = await anext(stream)
    await collect(engine, "quick", max_tokens=45)
    outputs = [first, *[output async for output in stream]]
    assert len(outputs) < 12, "it was not held up by the other, nor flooded afterwards"
    assert whole(outputs, kind)["slow", 0][1] == TOKENS
    assert_nothing_left(engine)


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("way", ["close", "cancel", "abort"])
@looped
async def test_leaving_at_every_output_ends_the_request_alone(index, way):
    engine = make_async(lambda request: TOKENS)
    other = asyncio.create_task(collect(engine, "other", max_tokens=20))
    seen = []

    async def consume():
        stream = engine.generate([4], SamplingParams(max_tokens=7, n=2), "r")
        try:
            while len(seen) < index:
                seen.append(await anext(stream))
            if way == "close":
                return
            if way == "abort":
                await engine.abort("r")
            else:
                asyncio.current_task().cancel()
            seen.extend([output async for output in stream])
        except StopAsyncIteration:
            pass
        finally:
            await stream.aclose()

    await asyncio.gather(consume(), return_exceptions=True)
    assert "r" not in engine.front_end.outputs._by_name
    assert whole(await other, KINDS[0])["other", 0][1] == TOKENS[:20]
    assert_nothing_left(engine)


@looped
async def test_a_cancelled_task_aborts_its_request():
    engine = make_async(lambda request: TOKENS[:5])  # stands still behind the fifth token
    task = asyncio.create_task(collect(engine, "r", max_tokens=40))
    while not core_of(engine).requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert core_of(engine).aborted == [0]
    assert_nothing_left(engine)


@looped
async def test_aborts_before_twice_and_after_are_nothing():
    engine = make_async(lambda request: TOKENS)
    await engine.abort("r")
    await engine.abort(["r", "s"])
    stream = engine.generate([4], SamplingParams(max_tokens=9), "r")
    first = await anext(stream)
    await engine.abort("r")
    await engine.abort("r")
    rest = [output async for output in stream]
    assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
    assert rest[-1].outputs[0].token_ids[:1] == first.outputs[0].token_ids
    await engine.abort("r")
    await collect(engine, "r", max_tokens=3)
    await engine.abort("r")
    assert_nothing_left(engine)


@looped
async def test_an_external_id_ends_all_that_share_it_and_an_internal_one_its_own():
    engine = make_async(lambda request: TOKENS[:5])
    first = await engine.add_request("same", [4], SamplingParams(max_tokens=40))
    second = await engine.add_request("same", [5], SamplingParams(max_tokens=40))
    third = await engine.add_request("same", [6], SamplingParams(max_tokens=40))
    assert {each.external_req_id for each in (first, second, third)} == {"same"}
    await engine.abort(second.request_id, internal=True)
    output = await second.get()
    assert (output.request_id, output.outputs[0].finish_reason) == ("same", "abort")
    await engine.abort("same", internal=True)
    assert engine.get_num_unfinished_requests() == 2
    await engine.abort("same")
    for mailbox in (first, third):
        assert (await mailbox.get()).outputs[0].finish_reason == "abort"
    assert_nothing_left(engine)


@looped
async def test_too_many_requests_are_refused_with_a_hint():
    engine = make_async(lambda request: TOKENS[:5], limits=(3, 10_000), log_stats=True)
    tasks = [asyncio.create_task(collect(engine, f"{i}", max_tokens=40)) for i in range(2)]
    await asyncio.sleep(0)
    engine.check_admission(1)
    with pytest.raises(QueueOverflowError, match="max_num_queued_reqs=3") as caught:
        await collect(engine, "two more", max_tokens=4, n=2)
    assert 0 < caught.value.retry_after_s <= 60
    rejected = {
        m.labels["reason"]: m.value
        for m in engine.get_metrics()
        if m.name == "vllm:admission_rejections"
    }
    assert rejected["max_num_queued_reqs"] == 1
    await engine.abort(["0", "1"])
    await asyncio.gather(*tasks)
    assert_nothing_left(engine)


@looped
async def test_too_many_waiting_tokens_are_refused():
    engine = make_async(lambda request: [], limits=(100, 5))  # nothing ever starts
    mailbox = await engine.add_request("a", [4] * 5, SamplingParams(max_tokens=4))
    assert engine.get_num_queued_tokens() == 5
    with pytest.raises(MaxQueuedTokensError, match="5 prompt tokens wait"):
        await collect(engine, "b", max_tokens=4)
    await engine.abort(mailbox.request_id, internal=True)
    assert_nothing_left(engine)


@looped
async def test_a_started_prompt_waits_no_more():
    engine = make_async(lambda request: TOKENS[:2], limits=(100, 5))
    mailbox = await engine.add_request("a", [4] * 5, SamplingParams(max_tokens=4))
    await mailbox.get()
    assert engine.get_num_queued_tokens() == 0
    engine.check_admission()


@looped
async def test_a_request_whose_time_is_over_ends_once_with_what_it_has():
    engine = make_async(lambda request: TOKENS[:5])
    extra = {"timeout_s": 1.0}  # for five steps
    outputs = await collect(engine, "late", max_tokens=40, extra_args=extra)
    [completion] = outputs[-1].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("abort", "timeout")
    assert completion.token_ids == TOKENS[:5]
    assert sum(output.finished for output in outputs) == 1
    in_time = await collect(engine, "quick", max_tokens=3, extra_args={"timeout_s": 60})
    assert in_time[-1].outputs[0].finish_reason == "length"
    for wrong in (0, -1, "soon", True):
        with pytest.raises(InvalidParameter, match="timeout_s"):
            await collect(engine, "x", max_tokens=3, extra_args={"timeout_s": wrong})
    assert_nothing_left(engine)


@pytest.mark.parametrize("fails", ["_arm", "front_end._set_deadline", "front_end._trace"])
@looped
async def test_a_request_that_cannot_be_followed_is_not_left_in_the_core(fails, monkeypatch):
    engine = make_async(lambda request: TOKENS)
    owner, _, name = fails.rpartition(".")

    def fail(*args):
        raise OSError("by the test")

    monkeypatch.setattr(engine.front_end if owner else engine, name, fail)
    with pytest.raises(OSError, match="by the test"):
        await engine.add_request("r", [4], SamplingParams(max_tokens=9), timeout_s=60.0)
    assert_nothing_left(engine)


def test_deadlines_hold_for_the_blocking_face_too():
    engine = make_engine(lambda request: TOKENS[:5])
    engine.add_request("r", [4], SamplingParams(max_tokens=40, extra_args={"timeout_s": 1e-6}))
    [output] = engine.step()
    assert output.outputs[0].stop_reason == "timeout"
    assert not engine.has_unfinished_requests()


def test_deadlines_of_requests_that_have_ended_are_not_kept():
    engine = make_engine(lambda request: TOKENS[:1])
    times = {"max_tokens": 1, "extra_args": {"timeout_s": 3600}}
    for _ in range(1000):
        engine.add_request("r", [4], SamplingParams(**times))
        assert engine.step()[0].finished
        assert len(engine.front_end._deadlines) <= 66
    engine.add_request("late", [4], SamplingParams(max_tokens=9, extra_args={"timeout_s": 1e-6}))
    for _ in range(200):
        engine.add_request("r", [4], SamplingParams(**times))
    assert engine.step()[0].outputs[0].stop_reason == "timeout", "the earliest is still first"


@looped
async def test_bad_requests_are_refused_and_nothing_else_happens():
    engine = make_async()
    for prompt, params, error in (
        ([], {}, InvalidParameter),
        ([10**9], {}, RequestError),
        ([4], {"logprobs": 1000}, RequestError),
    ):
        with pytest.raises(error):
            await collect(engine, "r", prompt, **params)
    with pytest.raises(InvalidType, match="this engine generates text"):
        await anext(engine.encode([4], PoolingParams(task="embed"), "r"))
    with pytest.raises(TypeError):
        await collect(engine, 7)
    assert_nothing_left(engine)
    assert (await collect(engine, "r", max_tokens=2))[-1].finished


# streaming input


def parts_of(*parts):
    async def stream():
        for part in parts:
            await asyncio.sleep(0)
            yield part

    return stream()


@looped
async def test_streamed_prompts_go_to_the_core_part_by_part():
    engine = make_async(lambda request: [])
    params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
    longer = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.DELTA)
    stream = parts_of(StreamingInput([4, 5]), StreamingInput([6], longer), StreamingInput([7]))
    mailbox = await engine.add_request("r", stream, params)
    core = core_of(engine)
    while len(core.seen) < 4:
        await asyncio.sleep(0)
    assert [seen.prompt_token_ids for seen in core.seen] == [[4, 5], [6], [7], []]
    assert [seen.sampling_params.max_tokens for seen in core.seen[:3]] == [4, 9, 9]
    assert [(seen.resumable, seen.continues) for seen in core.seen] == [
        (True, False), (True, True), (True, True), (False, True),
    ]  # fmt: skip
    assert {seen.handle for seen in core.seen} == {0}
    await engine.abort(mailbox.request_id, internal=True)


@looped
async def test_an_input_stream_that_fails_ends_its_request_with_its_error():
    engine = make_async(lambda request: TOKENS[:2])

    async def breaks():
        yield StreamingInput([4])
        raise LookupError("no more audio")

    with pytest.raises(LookupError, match="no more audio"):
        async for _ in engine.generate(breaks(), SamplingParams(max_tokens=9), "r"):
            pass
    assert_nothing_left(engine)


UNSTREAMABLE = {
    "n": {"n": 2},
    "stop": {"stop": ["x"]},
    "output_kind": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(json_object=True)},
    "thinking_token_budget": {"thinking_token_budget": 3},
    "logprobs": {"logprobs": 1000},
    "stop_token_ids": {"stop_token_ids": [10**6]},
}
"""What a streamed prompt, or this model, cannot have."""


@pytest.mark.parametrize("name", UNSTREAMABLE)
@looped
async def test_what_a_streamed_prompt_cannot_have_is_refused(name):
    engine = make_async()
    params = SamplingParams(**UNSTREAMABLE[name])
    with pytest.raises(InvalidParameter, match=f"^{name}="):
        await engine.add_request("r", parts_of(StreamingInput([4])), params)
    with pytest.raises(InvalidType, match="needs SamplingParams"):
        await engine.add_request("r", parts_of(StreamingInput([4])), PoolingParams(task="embed"))
    assert_nothing_left(engine)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("name", UNSTREAMABLE)
@looped
async def test_the_parameters_of_each_part_are_checked(name, place):
    engine = make_async(lambda request: TOKENS)
    wrong = SamplingParams(**UNSTREAMABLE[name])
    parts = [StreamingInput([4]), StreamingInput([5], wrong)][1 - place :]
    params = SamplingParams(max_tokens=4)
    with pytest.raises(InvalidParameter, match=f"^{name}="):
        async for _ in engine.generate(parts_of(*parts), params, "r"):
            pass
    mailbox = await engine.add_request("r", parts_of(*parts), params)
    with pytest.raises(InputStreamError) as caught:
        while True:
            await mailbox.get()
    assert isinstance(caught.value.cause, InvalidParameter)
    assert_nothing_left(engine)
    assert len(core_of(engine).seen) == 2 * place


@pytest.mark.parametrize(
    ("part", "error", "text"),
    [
        ("text", InvalidType, "StreamingInput"), ([4], InvalidType, "StreamingInput"),
        (StreamingInput([-1]), InvalidParameter, "prompt_token_ids=-1"),
        (StreamingInput(3.5), InvalidType, "prompt=3.5"),
        (StreamingInput([4], PoolingParams()), InvalidType, "needs SamplingParams"),
        (StreamingInput([4], SamplingParams(extra_args={"timeout_s": 3})), InvalidParameter,
         "one time limit"),
    ],
    ids=str,
)  # fmt: skip
@looped
async def test_a_part_that_is_none_ends_its_request(part, error, text):
    engine = make_async(lambda request: TOKENS)
    for parts in ([part], [StreamingInput([4]), part]):
        with pytest.raises(error, match=text):
            async for _ in engine.generate(parts_of(*parts), SamplingParams(max_tokens=3), "r"):
                pass
        assert_nothing_left(engine)


@looped
async def test_a_stream_without_parts_ends_its_request():
    engine = make_async()
    with pytest.raises(RequestError, match="before its first part"):
        async for _ in engine.generate(parts_of(), SamplingParams(), "r"):
            pass
    mailbox = await engine.add_request("r", parts_of(), SamplingParams())
    with pytest.raises(InputStreamError, match="before its first part"):
        await mailbox.get()
    assert_nothing_left(engine)


class Fed:
    """A stream of parts that come from a queue; `was_closed` once it is left."""

    def __init__(self):
        self.parts, self.was_closed = asyncio.Queue(), False

    async def stream(self):
        try:
            while (part := await self.parts.get()) is not None:
                yield part
        finally:
            self.was_closed = True


@looped
async def test_a_request_is_added_before_its_first_part_has_come():
    engine = make_async(lambda request: TOKENS[: len(request.prompt_token_ids)])
    fed = Fed()
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
    mailbox = await engine.add_request("r", fed.stream(), params)
    assert engine.get_num_unfinished_requests() == 1 and not core_of(engine).seen
    fed.parts.put_nowait(StreamingInput({"prompt_token_ids": [4, 5], "prompt": "shown"}))
    output = await mailbox.get()
    assert (output.prompt, output.prompt_token_ids) == ("shown", [4, 5])
    assert [request.prompt_token_ids for request in core_of(engine).seen] == [[4, 5]]
    await engine.abort("r")
    while not output.finished:
        output = await mailbox.get()
    assert output.outputs[0].finish_reason == "abort"
    while engine._feeders.running:
        await asyncio.sleep(0)
    assert fed.was_closed
    assert_nothing_left(engine)


@pytest.mark.parametrize("way", ["abort", "internal", "close", "timeout", "shutdown"])
@looped
async def test_the_end_of_a_request_before_its_first_part_is_seen(way):
    engine = make_async()
    fed, params = Fed(), SamplingParams(max_tokens=3)
    if way == "close":
        stream = engine.generate(fed.stream(), params, "r")
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    else:
        limit_s = 0.01 if way == "timeout" else None
        mailbox = await engine.add_request("r", fed.stream(), params, timeout_s=limit_s)
        await asyncio.sleep(0)
        if way in ("abort", "internal"):
            name = "r" if way == "abort" else mailbox.request_id
            await engine.abort(name, internal=way == "internal")
        if way == "shutdown":
            engine.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await mailbox.get()
        else:
            output = await mailbox.get()
            [completion] = output.outputs
            assert output.finished and completion.finish_reason == "abort"
            assert completion.stop_reason == ("timeout" if way == "timeout" else None)
            assert (output.prompt_token_ids, list(completion.token_ids)) == ([], [])
    while engine._feeders.running:
        await asyncio.sleep(0)
    assert fed.was_closed and not core_of(engine).seen
    assert_nothing_left(engine)


@looped
async def test_what_shows_outputs_holds_for_the_whole_stream():
    engine = make_async(lambda request: [])
    params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA, logprobs=2, seed=5)
    fed = Fed()
    mailbox = await engine.add_request("r", fed.stream(), params)
    core = core_of(engine)
    for count, own in enumerate((SamplingParams(max_tokens=7), None, SamplingParams(logprobs=2))):
        fed.parts.put_nowait(StreamingInput([4], own))
        while len(core.seen) <= count:
            await asyncio.sleep(0)
    sent = [request.sampling_params for request in core.seen]
    assert [each.max_tokens for each in sent] == [7, 7, 16]
    assert {(each.output_kind.name, each.logprobs, each.seed) for each in sent} == {("DELTA", 2, 5)}
    assert core.seen[0].seed == 5
    fed.parts.put_nowait(StreamingInput([4], SamplingParams(logprobs=3)))
    with pytest.raises(InputStreamError, match="logprobs=3 .* that of the first, 2"):
        await mailbox.get()
    first = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
    mailbox = await engine.add_request("s", parts_of(StreamingInput([4], first)), SamplingParams())
    while len(core.seen) < 4:
        await asyncio.sleep(0)
    assert core.seen[3].sampling_params.output_kind is RequestOutputKind.DELTA
    await engine.abort(["r", "s"])
    assert_nothing_left(engine)


@pytest.mark.parametrize("num_parts", [1, 4])
@looped
async def test_parts_draw_no_seeds_of_others(num_parts):
    engine = make_async(lambda request: [])
    parts = [StreamingInput([4]) for _ in range(num_parts)]
    await engine.add_request("r", parts_of(*parts), SamplingParams())
    core = core_of(engine)
    while len(core.seen) < num_parts:
        await asyncio.sleep(0)
    await engine.add_request("s", [4], SamplingParams())
    plain = make_engine(lambda request: [], seed=0)
    for name in ("r", "s"):
        plain.add_request(name, [4], SamplingParams())
    wanted = [request.seed for request in plain.front_end.client.seen]
    assert [core.seen[0].seed, core.seen[-1].seed] == wanted
    await engine.abort(["r", "s"])


# the engine as a whole


@looped
async def test_pausing_in_the_old_and_the_new_form():
    engine = make_async(lambda request: TOKENS)
    stream = engine.generate([4], SamplingParams(max_tokens=30), "r")
    await anext(stream)
    await engine.pause_generation("keep", clear_cache=False)
    assert await engine.is_paused() and not engine.errored
    await engine.resume_generation()
    assert not await engine.is_paused()
    await engine.pause_generation(wait_for_inflight_requests=False)
    assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
    await engine.resume_generation()
    await engine.sleep(0)
    assert await engine.is_sleeping()
    assert await engine.wake_up() is True
    assert (await collect(engine, "s", max_tokens=2))[-1].finished
    assert_nothing_left(engine)


@looped
async def test_questions_and_resets():
    engine = make_async(log_stats=True)
    assert await engine.reset_prefix_cache() is True
    await engine.reset_mm_cache()
    await engine.reset_encoder_cache()
    await engine.check_health()
    await engine.start_profile()
    assert await engine.stop_profile() == []
    assert await engine.get_supported_tasks() == ("generate",)
    assert await engine.collective_rpc("name", args=[1]) == [("name", (1,), {})]
    assert await engine.is_tracing_enabled() is False
    assert engine.tokenizer is engine.get_tokenizer()
    assert engine.is_running and engine.is_alive() and engine.is_ready() and not engine.is_stopped
    await collect(engine, "r", max_tokens=4)
    await engine.do_log_stats()
    [metric] = [m for m in engine.get_metrics() if m.name == "vllm:generation_tokens"]
    assert (metric.labels, metric.value) == ({"model_name": "scripted", "engine": "0"}, 4)
    assert await engine.add_lora(LoRARequest("a", 3, "/a")) and await engine.pin_lora(3)
    assert await engine.list_loras() == {3}
    assert await engine.remove_lora(3) and not await engine.remove_lora(3)
    assert await engine.list_loras() == set()


@looped
async def test_draining_waits_for_the_last_request():
    engine = make_async(lambda request: TOKENS)
    await engine.wait_for_requests_to_drain(0)
    task = asyncio.create_task(collect(engine, "r", max_tokens=30))
    await asyncio.sleep(0)
    await engine.wait_for_requests_to_drain()
    assert engine.get_num_unfinished_requests() == 0
    await task
    stuck = await engine.add_request("s", [4], SamplingParams(max_tokens=1000))
    with pytest.raises(TimeoutError):
        await engine.wait_for_requests_to_drain(0.01)
    await engine.abort(stuck.request_id, internal=True)


@looped
async def test_death_ends_every_stream_with_one_error():
    def dies():
        if len(core_of(engine).seen) == 3:
            raise EngineDeadError("killed")

    engine = make_async(lambda request: TOKENS[:5], before_step=dies)
    tasks = [asyncio.create_task(collect(engine, f"{i}", max_tokens=40)) for i in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(type(r), str(r)) for r in results] == [(EngineDeadError, "killed")] * 3
    assert engine.errored and engine.is_stopped and not engine.is_running
    assert not engine.is_alive() and not engine.is_ready()
    assert isinstance(engine.dead_error, EngineDeadError)
    for call in (engine.check_health(), engine.is_paused(), collect(engine, "x")):
        with pytest.raises(EngineDeadError, match="killed"):
            await call
    engine.shutdown()


@looped
async def test_a_bug_in_the_handler_is_a_death_not_a_silence(monkeypatch):
    engine = make_async(lambda request: TOKENS)

    def broken(outputs):
        raise KeyError("bug")

    monkeypatch.setattr(engine.front_end.outputs, "process", broken)
    with pytest.raises(EngineDeadError, match="KeyError"):
        await collect(engine, "r", max_tokens=4)
    assert engine.errored


@looped
async def test_shutting_down_ends_streams_and_may_be_repeated():
    engine = make_async(lambda request: TOKENS[:3])
    stream = engine.generate([4], SamplingParams(max_tokens=40), "r")
    await anext(stream)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass
    assert core_of(engine).is_shut_down
    with pytest.raises(EngineError):
        await engine.sleep()
