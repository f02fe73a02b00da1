"""Several API server processes before the same cores: `quire serve --api-server-count 2`."""

import contextlib
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.server.conftest import KEYS
from tests.server.serve_process import serving

KEY = {"Authorization": f"Bearer {KEYS[0]}"}
FIELDS = {"model": "", "temperature": 0, "ignore_eos": True}
PROMPTS = [f"def f{number}(a, b):" for number in range(16)]


@pytest.fixture(scope="module")
def pair():
    """Two API servers; tests leave both alive."""
    flags = ("--api-server-count", "2", "--enable-admin", "--api-key", *KEYS)
    with serving(*flags, "--max-num-queued-reqs", "24") as running:
        yield running


def processes_of(server):
    children = psutil.Process(server.process.pid).children()
    return {child: " ".join(child.cmdline()) for child in children}


def api_servers(server):
    return [child for child, code in processes_of(server).items() if "api_server" in code]


def ports_of(process):
    """The client ports of the connections that a server has taken."""
    return {each.raddr.port for each in process.net_connections("tcp") if each.raddr}


class Stream:
    """One stream, on a connection of its own: its text so far, the port it is sent from."""

    def __init__(self, server, prompt, max_tokens, headers=KEY):
        self._body = {**FIELDS, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._server = server
        self._headers = headers
        self.text = ""
        self.is_whole = False
        self.reason = None
        self.begun = threading.Event()
        self.port = None

    def run(self):
        try:
            with (
                self._server.client() as client,
                client.stream(
                    "POST", "/v1/completions", json=self._body, headers=self._headers
                ) as reply,
            ):
                self.port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
                assert reply.status_code == 200, reply.read()
                self._read(reply.iter_lines())
        except (httpx.RemoteProtocolError, httpx.ReadError):
            return
        finally:
            self.begun.set()

    def _read(self, lines):
        for line in filter(None, lines):
            if line == "data: [DONE]":
                self.is_whole = True
                return
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
            self.begun.set()


@contextlib.contextmanager
def streams(server, max_tokens, **options):
    """All PROMPTS at once; in the block all have begun, after it all have ended."""
    found = [Stream(server, prompt, max_tokens, **options) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(found)) as pool:
        running = [pool.submit(stream.run) for stream in found]
        for stream in found:
            assert stream.begun.wait(60)
        yield found
        for each in running:
            each.result(60)


def texts(server, max_tokens=32, **options):
    with streams(server, max_tokens, **options) as found:
        pass
    assert all(stream.is_whole for stream in found)
    return [stream.text for stream in found]


def counter(server, name, **labels):
    """The value of a metric, of all series with these labels."""
    found = 0.0
    for line in server.get("/metrics", headers=KEY).text.splitlines():
        if line.startswith(f"vllm:{name}{{") and all(
            f'{k}="{v}"' in line for k, v in labels.items()
        ):
            found += float(line.rpartition(" ")[2])
    return found


def test_both_answer_and_the_texts_are_those_of_one_server(pair, server):
    with streams(pair, 1500) as found:  # all of them run while they are counted
        taken = [ports_of(process) for process in api_servers(pair)]
        load = pair.get("/load", headers=KEY).json()["server_load"]
        pair.post("/abort_requests", {}, headers=KEY)
    assert len(taken) == 2
    by_server = [sum(stream.port in ports for stream in found) for ports in taken]
    assert sum(by_server) == len(PROMPTS)
    assert all(by_server), "a server got no connection"
    assert load == len(PROMPTS)
    assert texts(pair, 80) == texts(server, 80, headers={})


def test_metrics_count_every_request_once_whoever_is_asked(pair):
    before = counter(pair, "request_success_total", finished_reason="length")
    generated = counter(pair, "generation_tokens_total")
    steps = counter(pair, "iteration_tokens_total_sum")
    texts(pair, 16)
    for _ in range(6):  # each is a connection of its own
        assert counter(pair, "request_success_total", finished_reason="length") == before + 16
        assert counter(pair, "generation_tokens_total") == generated + 16 * 16
        assert counter(pair, "time_to_first_token_seconds_count") >= 16
        assert counter(pair, "num_requests_running") == 0
    computed = counter(pair, "iteration_tokens_total_sum") - steps
    assert 16 * 16 <= computed <= 16 * 16 + sum(map(len, PROMPTS))


def test_the_limit_of_what_waits_is_one_for_both(pair):
    def status(number):
        body = {**FIELDS, "prompt": f"x{number}", "max_tokens": 600}
        return pair.post("/v1/completions", body, headers=KEY).status_code

    before = counter(pair, "admission_rejections_total")
    with ThreadPoolExecutor(40) as pool:
        found = sorted(pool.map(status, range(40)))
    num_refused = sum(code in (429, 503) for code in found)
    assert found.count(200) + num_refused == 40
    assert 12 <= num_refused <= 16, found  # 24 may be unfinished; two may come at the same moment
    assert counter(pair, "admission_rejections_total") == before + num_refused


def test_control_reaches_the_engine_and_an_abort_reaches_both(pair):
    with streams(pair, 1500) as found:
        reply = pair.post("/abort_requests", {}, headers=KEY)
        assert reply.json() == {"status": "aborted", "aborted": len(PROMPTS)}
    assert {stream.reason for stream in found} == {"abort"}
    assert pair.post("/pause", None, headers=KEY).status_code == 200
    for _ in range(4):
        assert pair.get("/is_paused", headers=KEY).json() == {"is_paused": True}
    assert pair.post("/resume", None, headers=KEY).status_code == 200
    assert pair.get("/ready").status_code == 200
    unknown = {**KEY, "X-Data-Parallel-Rank": "7"}
    body = {**FIELDS, "prompt": "x", "max_tokens": 1}
    assert pair.post("/v1/completions", body, headers=unknown).status_code == 400


def test_responses_are_not_kept_and_it_is_said(pair):
    body = {"model": "", "input": "hello", "max_output_tokens": 4}
    reply = pair.post("/v1/responses", body, headers=KEY).json()
    assert reply["store"] is False
    again = pair.post("/v1/responses", {**body, "background": True}, headers=KEY)
    assert again.status_code == 400
    assert "keeps no responses" in again.json()["error"]["message"]


def test_a_server_that_dies_costs_its_own_streams_alone(pair):
    right = texts(pair, 300)
    victim, other = api_servers(pair)
    with streams(pair, 300) as found:
        hit = ports_of(victim)
        victim.kill()
    lost = [stream for stream in found if stream.port in hit]
    assert lost
    assert len(lost) < len(found)
    for stream, text in zip(found, right, strict=True):
        if stream in lost:
            assert not stream.is_whole
            assert text.startswith(stream.text)
        else:
            assert stream.is_whole
            assert stream.text == text
    # connections that go to the dead one's socket wait for its next life
    assert texts(pair, 300) == right
    assert other in api_servers(pair)
    assert len(api_servers(pair)) == 2
    assert counter(pair, "num_requests_running") == 0
    assert counter(pair, "kv_cache_usage_perc") == 0
    assert f"Aborting {len(lost)} requests of an API server that has exited." in pair.log
    assert "was killed by SIGKILL; restarting it." in pair.log


def test_a_core_that_dies_costs_no_stream_of_either(pair):
    right = texts(pair, 100)
    [core] = [child for child, code in processes_of(pair).items() if "core_main" in code]
    with streams(pair, 100) as found:
        core.kill()
    assert [stream.text for stream in found] == right
    assert all(stream.is_whole for stream in found)


def test_sigterm_drains_both_and_leaves_nothing_behind():
    with serving("--api-server-count", "2") as server:
        everybody = psutil.Process(server.process.pid).children(recursive=True)
        with streams(server, 100, headers={}) as found:
            server.process.send_signal(signal.SIGTERM)
        assert all(stream.is_whole and stream.reason == "length" for stream in found)
        assert server.wait() == 0, server.log
        psutil.wait_procs(everybody, timeout=20)
        assert not [each for each in everybody if each.is_running()]


def test_nothing_outlives_an_owner_that_is_killed():
    with serving("--api-server-count", "2") as server:
        everybody = psutil.Process(server.process.pid).children(recursive=True)
        assert len(everybody) >= 3
        server.process.kill()
        server.process.wait(20)
        gone, alive = psutil.wait_procs(everybody, timeout=20)
        assert not alive


def test_a_kept_response_needs_one_server():
    from quire.config.args.server_args import ServerArgs
    from quire.errors import InvalidParameter

    with pytest.raises(InvalidParameter, match="max_stored_responses"):
        ServerArgs(api_server_count=2, max_stored_responses=10).validate()
    assert ServerArgs(api_server_count=2).num_stored_responses == 0
    assert ServerArgs().num_stored_responses > 0
