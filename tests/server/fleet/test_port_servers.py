"""A server for each copy, at ports one after the other: `quire serve -dp 2 -dpm`."""

import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import psutil
import pytest

from quire import AsyncLLM, EngineArgs
from quire.cli.main import main
from quire.errors import InvalidParameter
from tests.server.serve_process import SMALL

START_S = 120


def free_ports(count):
    """The first of so many free ports, one after the other."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError):
            probes = [
                socket.create_server(("127.0.0.1", port)) for port in range(first, first + count)
            ]
            for probe in probes:
                probe.close()
            return first


def wait_for(condition, timeout_s=START_S):
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def status(port, path):
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10).status_code


def text(port):
    body = {"model": "", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    return reply.json()["choices"][0]["text"]


@pytest.mark.full
@pytest.mark.slow
def test_a_server_that_dies_is_back_at_its_port_and_the_other_does_not_notice():
    port = free_ports(3)
    flags = ["--port", str(port), "--data-parallel-supervisor-port", str(port + 2)]
    flags += ["-dp", "4", "-dpl", "2", "-dpr", "2", "-dpm", "--shutdown-timeout", "1"]
    served = subprocess.Popen([sys.executable, "-m", "quire", "serve", *SMALL, *flags])
    try:
        wait_for(lambda: status(port + 2, "/ready") == 200)
        assert text(port) == text(port + 1)
        children = {each.name(): each for each in psutil.Process(served.pid).children()}
        assert set(children) == {"Server_DP2", "Server_DP3"}
        children["Server_DP3"].kill()
        wait_for(lambda: status(port + 2, "/health") == 503)
        assert status(port, "/ready") == 200
        assert text(port + 1) == text(port), "it waits for the server that is starting"
        wait_for(lambda: status(port + 2, "/readyz") == 200)
    finally:
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--uds", "/tmp/none"], "uds"),
        (["--port", "0"], "port"),
        (["--api-server-count", "2"], "api_server_count"),
        (["--enable-admin", "--api-key", "a-key", "--admin-port", "0"], "admin_port"),
    ],
)
def test_flags_that_one_server_alone_can_have_are_refused(more, named, capsys):
    assert main(["serve", "-dp", "2", "-dpm", *more]) == 2
    assert f"follows from --port: no {named}." in capsys.readouterr().err


def test_an_engine_has_no_servers():
    wishes = EngineArgs(data_parallel_size=2, data_parallel_multi_port_external_lb=True)
    with pytest.raises(InvalidParameter, match="quire serve"):
        AsyncLLM.from_engine_args(wishes)
