"""A server answers while its model is being loaded."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from quire.testing import make_checkpoint
from tests.server.serve_process import SMALL, command_of

WAIT_S = 60


class Starting:
    """A server of which nobody waits until it serves."""

    def __init__(self, *flags, basis=SMALL):
        command = command_of(*flags, basis=basis)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = ""

    def url_in(self, beginning):
        for line in self.process.stderr:
            self.log += line
            if beginning in line:
                return next(word for word in line.split() if word.startswith("http:"))
        raise AssertionError(self.log)

    def core(self):
        [child] = [
            p for p in psutil.Process(self.process.pid).children() if "quire" in str(p.cmdline())
        ]
        return child

    def end(self):
        """What it has said, and its exit code."""
        _, rest = self.process.communicate(timeout=WAIT_S)
        return self.log + rest, self.process.returncode


@pytest.fixture
def starting():
    """Starts servers, and kills what is left of them."""
    started = []

    def start(*flags, **options):
        started.append(Starting(*flags, **options))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="stops the core's process")
def test_what_needs_no_model_is_answered_and_the_rest_waits(starting):
    server = starting()
    url = server.url_in("Loading")
    core = server.core()
    os.kill(core.pid, signal.SIGSTOP)
    with httpx.Client(base_url=url, timeout=WAIT_S) as client, ThreadPoolExecutor(1) as pool:
        for path in ("/health", "/ready", "/ping"):
            answer = client.get(path)
            assert answer.status_code == 503, path
            assert answer.json()["error"]["message"] == "The model is being loaded."
        [model] = client.get("/v1/models").json()["data"]
        tokens = client.post("/tokenize", json={"prompt": "one two", "model": model["id"]})
        assert tokens.json()["count"] > 1
        body = {"model": model["id"], "prompt": "one", "max_tokens": 2}
        completion = pool.submit(client.post, "/v1/completions", json=body)
        os.kill(core.pid, signal.SIGCONT)
        assert completion.result().json()["usage"]["completion_tokens"] == 2
        assert server.url_in("Serving") == url
        assert client.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[1] == 0


def test_a_server_whose_model_cannot_be_loaded_says_why_and_ends(starting, tmp_path):
    folder = make_checkpoint(tmp_path / "cut", {"num_hidden_layers": 1}, "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    log, code = starting(basis=["--model", str(folder)]).end()
    assert code == 1
    assert "quire: error:" in log and "incomplete download" in log
    assert "restart" not in log and "Traceback" not in log


def test_one_that_is_stopped_while_it_loads_ends_well(starting):
    server = starting()
    server.url_in("Loading")
    server.process.send_signal(signal.SIGTERM)
    log, code = server.end()
    assert code == 0 and "Stopped." in log
