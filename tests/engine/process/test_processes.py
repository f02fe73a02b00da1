"""Cores in processes of their own: the same answers, clean ends, deaths that are told."""

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from quire import LLM, EngineArgs, SamplingParams
from quire.engine import EngineCoreRequest as DocumentedRequest
from quire.engine.client.inproc import build_client
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from quire.engine.wire.output_parts import FinishReason
from quire.errors import (
    EngineDeadError,
    EngineError,
    InvalidParameter,
    InvalidType,
    LoadError,
    RequestError,
)
from quire.processes.codec import core_header
from tests.engine.launched import launch_async, launch_sync

pytestmark = pytest.mark.slow

PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = ["]
SMALL = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "max_model_len": 256,
}


def params(**more):
    return SamplingParams(
        **{"temperature": 0.8, "max_tokens": 12, "logprobs": 2, "seed": 7, **more}
    )


def texts(llm, prompts=PROMPTS):
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def request(handle, max_tokens=8, **more):
    own = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(handle, [5, 6, 7 + handle % 20], own, 1, 0.0, **more)


def drain(client, handles):
    tokens, open_ = {handle: [] for handle in handles}, set(handles)
    while open_:
        outputs = client.get_output()
        for one in outputs:
            tokens.setdefault(int(one.request_id), []).extend(one.new_token_ids)
            if one.finished:
                open_.discard(int(one.request_id))
    return tokens


def children():
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.fixture(scope="module")
def plan():
    return EngineArgs(**SMALL).create_engine_config()


@pytest.fixture(scope="module")
def client(plan):
    found = launch_sync(plan)
    yield found
    found.shutdown()


def test_llm_gives_the_same_in_this_process_and_in_another():
    before = set(children())
    with LLM(**SMALL) as here:
        expected = texts(here)
    with LLM(enable_multiprocessing=True, **SMALL) as there:
        assert texts(there) == expected
        assert there.llm_engine.is_sleeping() is False
        assert there.reset_prefix_cache() is True
        assert there.collective_rpc("kv_cache_bytes")[0] > 0
        with pytest.raises(InvalidParameter, match="cannot be sent to another process"):
            there.apply_model(lambda model: model)
        with pytest.raises(RequestError, match="a worker has the methods"):
            there.collective_rpc("no_such_method")
        with pytest.raises(RequestError, match=r"method='sleep' .* Call sleep\(\)"):
            there.collective_rpc("sleep", args=(["weights", "kv_cache"], False))
        assert texts(there) == expected
        [pid] = set(children()) - before
    assert set(children()) == before
    assert not psutil.pid_exists(pid)


def test_a_forked_child_is_refused_and_harms_nothing():
    with LLM(enable_multiprocessing=True, **SMALL) as llm:
        expected = texts(llm)
        child = os.fork()
        if not child:
            try:
                signal.alarm(30)
                texts(llm)
            except EngineError as error:
                llm.close()
                os._exit(7 if "forked from" in str(error) else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert texts(llm) == expected
        assert llm.llm_engine.front_end.client.num_restarts == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of /proc")
def test_the_threads_of_an_engine_are_bound_and_the_caller_is_not(plan):
    before = os.sched_getaffinity(0)
    bound = plan.changed(num_threads=2, thread_cpus=(str(min(before)),))

    def computing(pid):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {int(t.name) for t in tasks if (t / "comm").read_text().strip() == "quire-cpu"}

    def affinities(threads):
        return {frozenset(os.sched_getaffinity(thread)) for thread in threads}

    old_threads, old_children = computing(os.getpid()), set(children())
    for client in (build_client(bound), launch_sync(bound)):
        client.add_request(request(1))
        drain(client, {1})
        found = [computing(os.getpid()) - old_threads]
        found += [computing(pid) | {pid} for pid in set(children()) - old_children]
        assert affinities(found[-1]) == {frozenset({min(before)})}
        client.shutdown()
    assert os.sched_getaffinity(0) == before


def test_two_cores_give_what_one_gives_and_share_the_work():
    with LLM(**SMALL) as one:
        expected = texts(one, PROMPTS * 3)
    with LLM(data_parallel_size=2, **SMALL) as two:
        assert two.get_world_size() == 2
        assert texts(two, PROMPTS * 3) == expected
        client = two.llm_engine.front_end.client
        steps = [client.core_status(index) for index in client.engine_indices]
        assert all(status.is_running and status.is_started for status in steps)
        assert two.llm_engine.sleep(0) is None
        assert two.llm_engine.is_sleeping()
        assert two.wake_up() is True
        assert len(two.collective_rpc("kv_cache_bytes")) == 2


@pytest.mark.full
def test_a_rank_pins_a_request(plan):
    client = launch_sync(EngineArgs(data_parallel_size=2, **SMALL).create_engine_config())
    try:
        for handle in range(4):
            client.add_request(request(handle, data_parallel_rank=1))
            assert client.engine_of(handle) == 1
        with pytest.raises(InvalidParameter, match="data_parallel_rank"):
            client.add_request(request(9, data_parallel_rank=7))
        assert all(map(len, drain(client, range(4)).values()))
        os.kill(client.core_status(0).pid, signal.SIGKILL)
        client.add_request(request(5, max_tokens=200, data_parallel_rank=1))
        seen = []
        with pytest.raises(EngineDeadError) as caught:
            while True:
                seen += client.get_output()
        assert caught.value.engine_index == 0
        has_ended = any(one.finished for one in seen)  # where the death is noticed late
        assert has_ended or drain(client, [5])[5], "the other core goes on"
    finally:
        client.shutdown()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT])
@pytest.mark.sharp(when=lambda how: how == signal.SIGKILL)  # SIGSTOP: client/test_supervisor.py
def test_a_death_is_told_and_a_restart_serves_again(plan, how):
    client = launch_sync(plan)
    try:
        expected = drain_one(client, 1)
        client.add_request(request(2, max_tokens=200))
        client.get_output()
        first = client.core_status(0)
        os.kill(first.pid, how)
        with pytest.raises(EngineDeadError, match="killed by SIG") as caught:
            while True:
                client.get_output()
        assert caught.value.engine_index == 0
        with pytest.raises(EngineDeadError):
            client.add_request(request(3))
        assert not client.core_status(0).is_running
        client.remote.restart_core(0)
        assert drain_one(client, 1) == expected
        again = client.core_status(0)
        assert (again.incarnation, again.is_running) == (2, True)
        assert again.pid != first.pid
    finally:
        client.shutdown()
    assert first.pid not in children()


def drain_one(client, handle):
    client.add_request(request(handle))
    return drain(client, [handle])[handle]


def test_a_call_to_a_dying_core_fails(plan):
    client = launch_sync(plan)
    try:
        os.kill(client.core_status(0).pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            client.call(Utility("is_sleeping"))
    finally:
        client.shutdown()


def test_aborts_are_final_and_may_come_twice(client):
    for index in range(6):
        handle = 100 + index
        client.add_request(request(handle, max_tokens=100))
        for _ in range(index):
            client.get_output()
        client.abort_requests([handle])
        client.abort_requests([handle, 12345])
        assert client.engine_of(handle) is None
    while client.get_output().handles:
        continue  # what was on the way when the abort was sent
    assert drain_one(client, 200) == drain_one(client, 220)


def test_bytes_that_are_not_a_message_leave_both_sides_alive(plan, client):
    expected = drain_one(client, 300)
    rng = random.Random(5)
    sockets = client.remote.sockets
    identity = sockets.connections[0].identity
    context = zmq.Context()
    endpoint = sockets.from_cores.last_endpoint.rstrip(b"\0").decode()
    stranger, lost = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    lost.connect(sockets.to_cores.last_endpoint.rstrip(b"\0").decode())
    good = sockets._encoder.encode(request(301))[0]
    kinds = list(EngineCoreRequestType)
    for place in range(200):
        noise = rng.choice(
            [rng.randbytes(rng.randrange(60)), good[: place % len(good)], pickle.dumps(print)]
        )
        header = core_header(
            rng.choice(kinds).value, rng.randrange(sockets.connections[0].num_sent + 1)
        )
        kind = rng.choice([header, header, header[: place % 9], b"\x63" + header[1:], b"", noise])
        sockets.to_cores.send_multipart([identity, kind, noise])
        stranger.send_multipart([noise, kind])
        lost.send_multipart([noise])
    assert drain_one(client, 300) == expected
    assert client.call(Utility("is_sleeping")) is False
    context.destroy(0)


def add_frames(sockets, number, message):
    header = core_header(EngineCoreRequestType.ADD.value, number)
    return [sockets.connections[0].identity, header, *sockets._encoder.encode(message)]


def test_requests_by_the_documented_fields_are_told_apart(client):
    def direct(name, last, max_tokens=8):
        own = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids = [5, 6, last]
        return DocumentedRequest(request_id=name, prompt_token_ids=ids, sampling_params=own)

    expected = {}
    for last in (7, 8):
        client.add_request(request(last - 7))
        expected[last] = drain(client, [last - 7])[last - 7]
    client.add_request(direct("one", 7))
    client.add_request(direct("two", 8))
    client.add_request(direct("gone", 9, max_tokens=200))
    client.abort_requests(["gone", "unknown"])
    tokens, open_ = {"one": [], "two": []}, {"one", "two"}
    while open_:
        outputs = client.get_output()
        for one in outputs:
            if one.request_id in tokens:
                tokens[one.request_id] += one.new_token_ids
        open_ -= outputs.finished_requests or set()
    assert tokens == {"one": expected[7], "two": expected[8]}
    with pytest.raises(InvalidType, match="arrival_time='x'"):
        client.add_request(DocumentedRequest("r", [5], arrival_time="x", sampling_params=params()))
    assert not client.remote.has_requests


def poison(handle, **fields):
    return msgspec.structs.replace(request(handle), **fields)


def test_what_cannot_be_decoded_ends_its_own_request_or_call_and_nothing_else(client):
    expected, pid = drain_one(client, 350), client.core_status(0).pid
    client.add_request(request(351))
    client.add_request(request(352, max_tokens=100, resumable=True))
    for handle, fields in (
        (360, {"arrival_time": "x"}), (361, {"data_parallel_rank": 0.0, "seed": 0.5}),
        (362, {"cache_salt": 3}), (363, {"prompt_token_ids": ["x"]}), (364, {"params": None}),
        (352, {"priority": [1], "continues": True}),
    ):  # fmt: skip
        client.add_request(poison(handle, **fields))
    client.add_request(request(353))
    future = client.remote.sockets.begin_call(Utility(5, ()), [0])
    ends = {}
    while len(ends) < 8:
        for end in client.get_output().finished:
            assert end.handle not in ends, "it ended twice"
            ends[end.handle] = end
    for handle in (360, 361, 362, 363, 364, 352):
        assert ends[handle].reason is FinishReason.ERROR
        assert ends[handle].message.startswith("the core cannot decode the request: ")
    assert "Expected `float`" in ends[360].message
    assert {ends[handle].reason for handle in (351, 353)} == {FinishReason.LENGTH}
    with pytest.raises(EngineError, match="Expected `str`"):
        client.get_output()
        future.result(timeout=0)
    assert drain_one(client, 350) == expected
    assert client.core_status(0).pid == pid and not client.remote.has_requests


def test_what_cannot_be_encoded_is_refused_by_name_and_leaves_nothing(client):
    for name, value in (
        ("extra_args", {"a": object()}), ("extra_args", {"a": 2**70}),
        ("extra_args", {"\ud800": 1}), ("cache_salt", "\ud800"), ("prompt_token_ids", [2**64]),
    ):  # fmt: skip
        own = request(370)
        setattr(own.params if name == "extra_args" else own, name, value)
        with pytest.raises(InvalidParameter, match=rf"(?s)^{name}=.* cannot be sent to another"):
            client.add_request(own)
        assert client.engine_of(370) is None and not client.remote.has_requests
    for value in (object(), 2**70, "\ud800"):
        with pytest.raises(InvalidParameter, match=r"collective_rpc=.* cannot be sent to another"):
            client.call(Utility("collective_rpc", ("kv_cache_bytes", None, [value], {})))
    assert client.call(Utility("is_sleeping")) is False


def test_a_repeated_request_runs_once(client):
    sockets = client.remote.sockets
    client.add_request(request(310))
    sockets.to_cores.send_multipart(
        add_frames(sockets, sockets.connections[0].num_sent, request(310))
    )
    tokens = drain(client, [310])
    assert tokens == {310: drain_one(client, 330)}
    assert client.get_output().finished == []


def test_a_lost_request_is_the_death_of_the_core(plan):
    client = launch_sync(plan)
    try:
        client.add_request(request(1))
        client.remote.sockets.connections[0].num_sent += 1
        client.add_request(request(2))
        with pytest.raises(EngineDeadError, match="message 3 came after message 1"):
            while True:
                client.get_output()
        client.remote.restart_core(0)
        assert len(drain_one(client, 3)) == 8
    finally:
        client.shutdown()


def test_repeated_outputs_are_dropped_and_a_gap_is_the_death_of_the_core(plan):
    client = launch_sync(plan)
    context = zmq.Context()
    try:
        sockets = client.remote.sockets
        stranger = context.socket(zmq.PUSH)
        stranger.connect(sockets.from_cores.last_endpoint.rstrip(b"\0").decode())
        expected = drain_one(client, 20)

        def forge(sequence, incarnation=1, protocol_version=PROTOCOL_VERSION):
            outputs = EngineCoreOutputs(
                handles=[40],
                token_ids=[1],
                sequence=sequence,
                incarnation=incarnation,
                protocol_version=protocol_version,
            )
            stranger.send_multipart(sockets._encoder.encode(outputs))

        forge(1)
        forge(99, incarnation=7)
        forge(99, protocol_version=PROTOCOL_VERSION + 1)
        client.add_request(request(40))
        assert drain(client, [40]) == {40: expected}
        forge(sockets.connections[0].order.num_taken + 1000)  # whatever comes before it
        client.add_request(request(41, max_tokens=200))
        with pytest.raises(EngineDeadError, match="of its messages to us"):
            while True:
                client.get_output()
    finally:
        context.destroy(0)
        client.shutdown()


def test_a_core_that_cannot_load_says_why(plan, tmp_path):
    before = children()
    broken = plan.changed(model_folder=str(tmp_path))
    with pytest.raises(LoadError) as caught:
        launch_sync(broken)
    assert str(tmp_path) in str(caught.value)
    assert children() == before


@pytest.mark.full
def test_an_event_loop_gets_the_same_and_hears_of_a_death(plan, client):
    expected = drain_one(client, 400)

    async def main():
        found = launch_async(plan)
        try:
            found.add_request(request(400))
            tokens = []
            while len(tokens) < 8:
                tokens += (await found.get_output()).token_ids
            assert await found.call(Utility("is_sleeping")) is False
            found.add_request(request(401, max_tokens=200))
            os.kill(found.core_status(0).pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                while True:
                    await found.get_output()
            found.remote.restart_core(0)
            found.add_request(request(400))
            again = []
            while len(again) < 8:
                again += (await found.get_output()).token_ids
            return tokens, again
        finally:
            found.shutdown()

    assert asyncio.run(main()) == (expected, expected)


@pytest.fixture
def short_path():
    """A new folder whose path leaves room for the names of sockets, 108 bytes in all."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        yield folder


def test_no_core_and_no_socket_outlives_a_killed_front_end(short_path):
    code = textwrap.dedent(f"""
        import os, sys, time
        from quire import EngineArgs
        from tests.engine.launched import launch_sync
        client = launch_sync(EngineArgs(**{SMALL!r}).create_engine_config())
        print(client.core_status(0).pid, flush=True)
        sys.stdin.read()
    """)
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(short_path)},
        text=True,
    )
    core = psutil.Process(int(done.stdout.readline()))
    assert list(Path(short_path).glob("quire-*"))
    assert oct(next(Path(short_path).glob("quire-*")).stat().st_mode & 0o777) == "0o700"
    done.kill()
    done.communicate()
    psutil.wait_procs([core], timeout=20)
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    EngineArgs(**SMALL)
    left = list(Path(short_path).glob("quire-*"))
    if left:  # the system killed the core before it could clean up: the next start does
        from quire.engine.process.socket_folder import make_socket_folder

        os.environ["TMPDIR"], before = str(short_path), os.environ.get("TMPDIR")
        tempfile.tempdir = None
        try:
            made = make_socket_folder()
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before
        left = [folder for folder in Path(short_path).glob("quire-*") if folder != made]
    assert left == []


@pytest.mark.full
def test_a_core_leaves_sigterm_to_its_owner_which_ends_it_in_order():
    roomy = SMALL | {"max_model_len": 4096, "num_gpu_blocks_override": 300}
    client = launch_sync(EngineArgs(**roomy).create_engine_config())
    try:
        client.add_request(request(1, max_tokens=4000))  # more than it makes until it is asked
        client.get_output()
        os.kill(client.core_status(0).pid, signal.SIGTERM)
        for _ in range(20):
            assert not client.get_output().finished
        client.remote.pool.ask_to_end()
        ended = []
        with pytest.raises(EngineDeadError, match="exited with code 0"):
            while True:
                ended += client.get_output().finished
        assert [str(end.reason) for end in ended] == ["abort"]
    finally:
        client.shutdown()


@pytest.mark.full
def test_a_closed_client_says_so_and_closes_once(plan):
    client = launch_sync(plan)
    client.add_request(request(1, max_tokens=200))
    client.shutdown(timeout=0.0)
    client.shutdown()
    for call in (client.get_output, lambda: client.add_request(request(2))):
        with pytest.raises(EngineDeadError, match="was closed"):
            call()
