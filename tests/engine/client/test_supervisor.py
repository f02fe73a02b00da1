"""Core processes that die under load: streams go on with the very tokens they would have had."""

import asyncio
import os
import shutil
import signal

import psutil
import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.embedded import path as embedded_model
from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend.frontend import build_front_end
from quire.engine.llm_engine import LLMEngine
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import EngineDeadError, EngineError, InvalidParameter
from quire.params import RequestOutputKind
from tests.engine.launched import launch_async

pytestmark = pytest.mark.slow

SMALL = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 400,
    "max_model_len": 256,
    "seed": 5,
}
PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = ["]
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "top_k": 20},
    {"temperature": 0.8, "stop": ["self.", "return"], "min_tokens": 25},
    {"temperature": 0.0, "bad_words": ["self"], "frequency_penalty": 0.5, "logprobs": 0},
]
CASES = [(prompt, kind) for kind in KINDS for prompt in PROMPTS[:3]]


def params(kind, **more):
    return SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **kind, **more})


def essence(output):
    one = output.outputs[0]
    return one.text, one.token_ids, one.logprobs, one.finish_reason, output.prompt_logprobs


def serve(engine, disturb=lambda num_steps: None):
    """Serve all cases, unseeded ones included: the engine's own seed makes theirs."""
    engine.front_end.inputs.generation._num_drawn = 0
    for index, (prompt, kind) in enumerate(CASES):
        engine.add_request(str(index), prompt, params(kind))
    found, num_steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = essence(output)
        num_steps += 1
        disturb(num_steps)
    return found


def pid_of(engine, index=0):
    return engine.front_end.client.core_status(index).pid


def engine_of(**more):
    args = EngineArgs(**{**SMALL, **more})
    return LLMEngine.from_engine_args(args, enable_multiprocessing=True)


@pytest.fixture(scope="module")
def expected():
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    try:
        return serve(engine)
    finally:
        engine.close()


@pytest.fixture
def no_orphans():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    psutil.wait_procs(left, timeout=60)
    assert not [process for process in left if process.is_running()]


@pytest.fixture(scope="module")
def engine():
    found = engine_of(logits_processors=["tests.support.poison:Poison"])
    yield found
    assert found.reset_prefix_cache(), "no block is held"
    found.close()


@pytest.mark.parametrize(
    ("how", "moments"),
    [(signal.SIGKILL, (1, 40)), (signal.SIGSTOP, (20,))],
    ids=["SIGKILL", "SIGSTOP"],
)
def test_streams_go_on_with_the_tokens_they_would_have_had(engine, expected, how, moments):
    before = engine.front_end.client.num_restarts

    def disturb(num_steps):
        if num_steps in moments:
            os.kill(pid_of(engine), how)

    assert serve(engine, disturb) == expected
    assert engine.front_end.client.num_restarts == before + len(moments)


def test_a_poisonous_request_costs_only_itself(engine, expected):
    poison = params({"temperature": 0.0}, extra_args={"poison_at": 4}, seed=1)
    engine.add_request("99", "y = 1", poison)
    found = serve(engine)
    _, token_ids, _, reason, _ = found.pop(99)
    assert (reason, len(token_ids)) == ("error", 4)
    assert found == expected


def test_what_kills_a_core_that_takes_it_in_costs_only_itself(engine, expected):
    """It never comes into a step, and would be sent to every life of the core."""
    poison = params({"temperature": 0.0}, extra_args={"poison_intake": True}, seed=1)
    engine.add_request("99", "y = 1", poison)
    found = serve(engine)
    _, token_ids, _, reason, _ = found.pop(99)
    assert (reason, token_ids) == ("error", [])
    assert found == expected


@pytest.mark.parametrize("harm", [{"exit_at": 3}, {"exit": True}], ids=str)
def test_custom_code_that_ends_the_interpreter_costs_its_request_alone(engine, expected, harm):
    client = engine.front_end.client
    before, pid = client.num_restarts, pid_of(engine)
    engine.add_request("99", "y = 1", params({"temperature": 0.0}, extra_args=harm, seed=1))
    found = serve(engine)
    _, token_ids, _, reason, _ = found.pop(99)
    assert (reason, len(token_ids)) == ("error", harm.get("exit_at", 0))
    assert found == expected and (client.num_restarts, pid_of(engine)) == (before, pid)


def test_a_request_that_no_core_can_decode_costs_no_life(engine, expected):
    client = engine.front_end.client
    before, pid = client.num_restarts, pid_of(engine)
    sampling = params(KINDS[0])
    for handle, fields in (
        (10**9, {"arrival_time": "x"}), (10**9 + 1, {"priority": [1]}), (10**9 + 2, {"seed": 0.5}),
    ):  # fmt: skip
        client.add_request(EngineCoreRequest(handle, [5, 6], sampling, **fields))
    with pytest.raises(InvalidParameter, match="cache_salt=.* lone surrogate"):
        client.add_request(EngineCoreRequest(10**9 + 3, [5], sampling, cache_salt="\ud800"))
    assert serve(engine) == expected
    assert (client.num_restarts, pid_of(engine)) == (before, pid)
    os.kill(pid, signal.SIGKILL)
    assert serve(engine) == expected, "nothing is sent again that could not be decoded"
    assert client.num_restarts == before + 1
    assert not client.supervisor.has_requests


def test_a_core_that_dies_idle_is_missed_by_nobody(engine, expected):
    process = psutil.Process(pid_of(engine))
    process.kill()
    process.wait(60)
    assert serve(engine) == expected


@pytest.mark.full
def test_a_loop_that_hangs_is_a_death(engine):
    engine.front_end.client.remote.longest_turn_s = 3.0
    engine.add_request("0", PROMPTS[0], params(KINDS[0], extra_args={"hang_at": 2}))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert (outputs[-1].outputs[0].finish_reason, len(outputs[-1].outputs[0].token_ids)) == (
        "error",
        2,
    )
    engine.front_end.client.remote.longest_turn_s = 300.0


@pytest.mark.full
def test_the_other_core_goes_on_when_one_of_two_dies(expected, no_orphans):
    engine = engine_of(data_parallel_size=2)
    served_meanwhile = []

    def disturb(num_steps):
        if num_steps == 20:
            os.kill(pid_of(engine, 1), signal.SIGKILL)
        client = engine.front_end.client
        is_back = client.num_restarts == 1 and client.core_status(1).is_started
        if num_steps > 20 and not is_back:
            served_meanwhile.append(num_steps)

    try:
        assert serve(engine, disturb) == expected
        assert engine.front_end.client.num_restarts == 1
        assert len(served_meanwhile) > 3
    finally:
        engine.close()


@pytest.mark.full
def test_pause_and_sleep_outlive_a_core(no_orphans):
    with LLM(enable_multiprocessing=True, **SMALL) as llm:
        engine = llm.llm_engine
        before = llm.generate(PROMPTS[0], params(KINDS[0]), use_tqdm=False)
        llm.sleep(2)
        os.kill(pid_of(engine), signal.SIGKILL)
        assert engine.is_sleeping()
        assert engine.front_end.client.num_restarts == 1
        assert llm.collective_rpc("kv_cache_bytes") == [0]
        llm.wake_up(["weights"])
        os.kill(pid_of(engine), signal.SIGKILL)
        with pytest.raises(EngineError, match="collective_rpc ran. It is back: call again"):
            llm.collective_rpc("kv_cache_bytes")
        assert engine.is_sleeping()
        assert llm.wake_up() is True
        again = llm.generate(PROMPTS[0], params(KINDS[0]), use_tqdm=False)
        assert again[0].outputs[0].token_ids == before[0].outputs[0].token_ids


def test_an_engine_is_given_up_when_restarts_bring_nothing(no_orphans):
    engine = engine_of(max_core_restarts=1)
    try:
        engine.add_request("0", PROMPTS[0], params(KINDS[0]))
        engine.sleep(0, "keep")
        with pytest.raises(EngineDeadError, match="was restarted 1 times and died again"):
            while True:
                os.kill(pid_of(engine), signal.SIGKILL)
                engine.is_sleeping()
        with pytest.raises(EngineDeadError, match="was restarted 1 times"):
            while True:
                engine.step()
    finally:
        engine.close()


@pytest.mark.full
def test_a_model_that_is_gone_is_not_a_reason_to_try_for_ever(tmp_path, no_orphans):
    folder = shutil.copytree(embedded_model(), tmp_path / "model")
    engine = engine_of(max_core_restarts=1, model=str(folder))
    try:
        engine.add_request("0", PROMPTS[0], params(KINDS[0], max_tokens=200))
        engine.step()
        os.kill(pid_of(engine), signal.SIGSTOP)  # or it might be done before its end
        shutil.rmtree(folder)
        os.kill(pid_of(engine), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="restarted 1 times and died again.*could not"):
            while engine.has_unfinished_requests():
                engine.step()
    finally:
        engine.close()


@pytest.mark.full
def test_without_restarts_the_first_death_is_the_end(no_orphans):
    engine = engine_of(max_core_restarts=0)
    try:
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            serve(engine, lambda num_steps: os.kill(pid_of(engine), signal.SIGKILL))
    finally:
        engine.close()


@pytest.mark.full
def test_streams_of_an_event_loop_go_on_whatever_their_kind(expected, no_orphans):
    plan = EngineArgs(**SMALL).create_engine_config()
    client = launch_async(plan, plan.parallel.max_core_restarts)
    engine = AsyncLLM(plan, front_end=build_front_end(plan, client))

    async def stream(index):
        prompt, own = CASES[index]
        kind = list(RequestOutputKind)[index % 3]
        pieces = []
        async for output in engine.generate(prompt, params(own, output_kind=kind), str(index)):
            pieces.append(output.outputs[0])
            if index == 0 and len(pieces) == 5:
                os.kill(client.core_status(0).pid, signal.SIGKILL)
                assert await engine.is_paused() is False
        if kind is RequestOutputKind.DELTA:
            return "".join(p.text for p in pieces), sum((p.token_ids for p in pieces), [])
        return pieces[-1].text, pieces[-1].token_ids

    async def run():
        found = await asyncio.gather(*(stream(index) for index in range(len(CASES))))
        engine.shutdown()
        return found

    found = asyncio.run(run())
    assert client.num_restarts == 1
    assert found == [expected[index][:2] for index in range(len(CASES))]
