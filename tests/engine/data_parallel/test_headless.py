"""Cores on another machine (here: another process, over TCP): who may join, and who ends whom."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import pytest
import zmq

from quire import LLM, EngineArgs, SamplingParams
from quire.engine.data_parallel.handshake import HandshakeServer, plan_digest, say_hello
from quire.engine.data_parallel.headless import run_headless
from quire.engine.wire.messages import EngineZmqAddresses
from quire.errors import EngineDeadError, EngineError, InvalidParameter
from quire.processes.cluster_keys import close_to_strangers, cluster_keys, introduce
from quire.testing.checkpoints import make_checkpoint
from tests.support.needs import needs_ranks

SECRET = "a shared secret of 32 characters"
SMALL = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "max_model_len": 256,
    "data_parallel_size": 2,
    "data_parallel_size_local": 1,
}
PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = ["]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=20)


@pytest.fixture
def port():
    """A free one below those that the system gives to connections, which others open meanwhile."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            number = random.SystemRandom().randrange(20_000, 32_000)
            probe.bind(("127.0.0.1", number))
            return number


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", SECRET)


def headless(port, **more):
    wishes = {"data_parallel_rpc_port": port, **SMALL, **more, "data_parallel_start_rank": 1}
    code = (
        "import sys; from quire import EngineArgs\n"
        "from quire.engine.data_parallel.headless import run_headless\n"
        f"sys.exit(run_headless(EngineArgs(**{wishes!r})))"
    )
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.fixture
def elsewhere(port):
    found = headless(port)
    yield found
    found.kill()
    found.wait()


def texts(llm):
    return [o.outputs[0].text for o in llm.generate(PROMPTS * 2, PARAMS, use_tqdm=False)]


@pytest.mark.slow
def test_a_core_elsewhere_gives_the_same_and_ends_with_the_front_end(port, elsewhere):
    alone = {k: v for k, v in SMALL.items() if not k.startswith("data_parallel")}
    with LLM(**alone) as llm:
        expected = texts(llm)
    with LLM(**SMALL, data_parallel_rpc_port=port) as llm:
        client = llm.llm_engine.front_end.client
        assert texts(llm) == expected
        [remote] = psutil.Process(elsewhere.pid).children()
        assert [client.core_status(index).is_started for index in (0, 1)] == [True, True]
        assert client.core_status(1).pid == remote.pid
    assert elsewhere.wait(30) == 0
    assert not remote.is_running()


@pytest.mark.slow
@pytest.mark.full
def test_a_core_elsewhere_that_died_takes_its_place_again(port, elsewhere):
    with LLM(**SMALL, data_parallel_rpc_port=port) as llm:
        expected = texts(llm)
        client = llm.llm_engine.front_end.client
        client.remote.silent_s = 1.0
        [remote] = psutil.Process(elsewhere.pid).children()
        os.kill(remote.pid, signal.SIGKILL)
        assert elsewhere.wait(30) == 1
        again = headless(port)
        try:
            assert texts(llm) == expected
            assert client.core_status(1).incarnation == 2
        finally:
            llm.close()
            assert again.wait(30) == 0


@pytest.mark.full
@pytest.mark.slow
def test_without_restarts_the_death_of_a_core_elsewhere_is_told(port, elsewhere):
    with LLM(**SMALL, data_parallel_rpc_port=port, max_core_restarts=0) as llm:
        llm.llm_engine.front_end.client.remote.silent_s = 1.0
        [remote] = psutil.Process(elsewhere.pid).children()
        os.kill(remote.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="core 1 is gone"):
            texts(llm)


@pytest.mark.slow
def test_cores_elsewhere_end_when_the_front_end_is_killed(port, elsewhere):
    wishes = {**SMALL, "data_parallel_rpc_port": port}
    code = f"from quire import LLM; llm = LLM(**{wishes!r}); print('up', flush=True); input()"
    front = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert front.stdout.readline() == b"up\n"
    [remote] = psutil.Process(elsewhere.pid).children()
    front.kill()
    front.communicate()
    assert elsewhere.wait(30) == 3
    assert not remote.is_running()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=needs_ranks)]
)
def test_cores_that_share_experts_may_be_elsewhere(port, tmp_path, sizes):
    folder = make_checkpoint(tmp_path, "tiny", family="qwen3_moe", dtype="float32")
    wishes = {**SMALL, "model": str(folder), "data_parallel_rpc_port": port}
    alone = {k: v for k, v in wishes.items() if not k.startswith("data_parallel")}
    with LLM(**alone) as llm:
        expected = texts(llm)
    wishes |= {"enable_expert_parallel": True, **sizes}
    there = headless(port, **wishes)
    try:
        with LLM(**wishes) as llm:
            client = llm.llm_engine.front_end.client
            assert texts(llm) == expected
            os.kill(client.remote.coordinator.pid, signal.SIGKILL)
            assert texts(llm) == expected
            [remote] = psutil.Process(there.pid).children()
            os.kill(remote.pid, signal.SIGKILL)
            assert there.wait(60) == 1
            there = headless(port, **wishes)
            assert texts(llm) == expected
            assert [client.core_status(index).incarnation for index in (0, 1)] == [2, 2]
        assert there.wait(60) == 0
    finally:
        there.kill()
        there.wait()


# who may join


def plan(**more):
    wishes = {**SMALL, "data_parallel_start_rank": 1, **more}
    return EngineArgs(**wishes).create_engine_config(headless=True)


def hello(port, server, mine, *, secret=SECRET, timeout_s=60.0, taken=()):
    """What becomes of a HELLO with `mine` that `server` answers."""
    context = zmq.Context()
    done = threading.Event()

    def join(indices):
        return None if set(indices) & set(taken) else [7] * len(indices)

    def answer():
        while not done.wait(0.01):
            server.take(join)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        endpoint = f"tcp://127.0.0.1:{port}"
        key = cluster_keys(secret).public
        front_end, welcome = say_hello(context, endpoint, key, mine, timeout_s)
        front_end.close()
        return welcome
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)
        server.close()


def served(port, mine):
    addresses = EngineZmqAddresses("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    keys = cluster_keys(SECRET)
    return HandshakeServer(f"tcp://127.0.0.1:{port}", keys, addresses, mine, [1])


def test_who_knows_the_secret_gets_the_addresses(port):
    welcome = hello(port, served(port, plan()), plan())
    assert welcome.addresses.input == "tcp://127.0.0.1:1"
    assert (welcome.incarnations, welcome.num_cores) == ([7], 2)


def test_who_does_not_know_the_secret_gets_no_answer(port):
    other = SECRET.replace("a", "b")
    with pytest.raises(TimeoutError, match="QUIRE_CLUSTER_SECRET"):
        hello(port, served(port, plan()), plan(), secret=other, timeout_s=0.5)


@pytest.mark.parametrize(
    ("more", "taken", "words"),
    [
        ({"seed": 3}, (), "settings differ"),
        ({"data_parallel_size_local": 1, "data_parallel_start_rank": 0}, (), "waits for cores"),
        ({}, (1,), "is here already"),
    ],
)
def test_who_does_not_belong_is_told_why(port, more, taken, words):
    with pytest.raises(EngineError, match=words):
        hello(port, served(port, plan()), plan(**more), taken=taken)


def test_who_comes_before_its_dead_predecessor_is_missed_asks_again(port):
    taken = [1]
    threading.Timer(0.5, taken.clear).start()
    assert hello(port, served(port, plan()), plan(), taken=taken).incarnations == [7]


def test_what_may_differ_between_machines_does_not_count():
    assert plan_digest(plan(cpu_threads=1)) == plan_digest(plan(max_num_seqs=4))
    assert plan_digest(plan()) != plan_digest(plan(max_model_len=128))


def test_bytes_that_are_not_a_hello_are_dropped(port):
    server, context = served(port, plan()), zmq.Context()
    keys = cluster_keys(SECRET)
    stranger, friend = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    introduce(friend, keys.public)
    for one in (stranger, friend):
        one.connect(f"tcp://127.0.0.1:{port}")
    for noise in (b"", b"\x80\x04K\x01.", b"\x91" * 1000, os.urandom(50)):
        stranger.send(noise)
        friend.send_multipart([noise, noise])
    assert hello(port, server, plan()).refusal is None
    context.destroy(linger=0)


@pytest.mark.parametrize("given", [None, "short"])
def test_without_a_secret_nobody_listens(monkeypatch, port, given):
    monkeypatch.delenv("QUIRE_CLUSTER_SECRET")
    if given:
        monkeypatch.setenv("QUIRE_CLUSTER_SECRET", given)
    with pytest.raises(InvalidParameter, match="QUIRE_CLUSTER_SECRET") as caught:
        LLM(**SMALL, data_parallel_rpc_port=port)
    assert "short" not in str(caught.value)
    with pytest.raises(InvalidParameter, match="QUIRE_CLUSTER_SECRET"):
        run_headless(EngineArgs(**SMALL, data_parallel_start_rank=1))


def test_the_key_is_not_shown():
    keys = cluster_keys(SECRET)
    assert keys.secret.decode() not in repr(keys)
    context = zmq.Context()
    try:
        bound = context.socket(zmq.PULL)
        close_to_strangers(bound, keys)
        assert bound.curve_server
    finally:
        context.destroy(linger=0)
