"""Two servers, one of which hands its live streams to the other: each goes on with the tokens that
it would have had, and ends once.
"""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest

from tests.server.fleet.test_disaggregated import config
from tests.server.serve_process import serving

pytestmark = pytest.mark.full

KEY = {"Authorization": "Bearer secret-key"}
FLAGS = (
    "--served-model-name",
    "m",
    "--block-size",
    "16",
    "--enable-admin",
    "--api-key",
    "secret-key",
)
TEXT = "def add(a, b):\n    return a + b\n" * 4
BODIES = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 7, "logprobs": 2, "frequency_penalty": 0.5},
    "formed": {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-c ]{700}"}},
}
TOKENS = 600


def body(name):
    return {
        "model": "m", "prompt": f"{name}: {TEXT}", "max_tokens": TOKENS, "ignore_eos": True,
        "stream": True, "return_token_ids": True, **BODIES[name],
    }  # fmt: skip


class Stream(threading.Thread):
    def __init__(self, server, name):
        super().__init__(daemon=True)
        self.server, self.name_of_body = server, name
        self.chunks, self.ends, self.has_begun = [], [], threading.Event()

    def run(self):
        with (
            self.server.client(headers=KEY) as client,
            client.stream("POST", "/v1/completions", json=body(self.name_of_body)) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    data = json.loads(line[6:])
                    assert "error" not in data, data
                    for choice in data["choices"]:
                        self.chunks.append(choice)
                        if choice["finish_reason"] is not None:
                            self.ends.append(choice["finish_reason"])
                    if len(self.chunks) >= 12:
                        self.has_begun.set()
                elif line == "data: [DONE]":
                    self.ends.append("done")

    @property
    def answer(self):
        return (
            "".join(choice["text"] for choice in self.chunks),
            [token for choice in self.chunks for token in choice.get("token_ids") or ()],
            [
                value
                for choice in self.chunks
                if choice.get("logprobs")
                for value in choice["logprobs"]["token_logprobs"]
            ],
        )


def streams(server):
    found = [Stream(server, name) for name in BODIES]
    for each in found:
        each.start()
    return found


def num_running(server):
    return server.metric("vllm:num_requests_running", headers=KEY)


@pytest.fixture(scope="module")
def expected():
    with serving(*FLAGS) as server:
        found = streams(server)
        for each in found:
            each.join(60)
        return [(each.answer, each.ends) for each in found]


def check(found, expected):
    for each, (answer, ends) in zip(found, expected, strict=True):
        each.join(60)
        assert each.ends == ends == [ends[0], "done"]
        assert each.answer == answer, each.name_of_body


def begun(server):
    found = streams(server)
    for each in found:
        assert each.has_begun.wait(60)
    return found


def drain(server, target, key="secret-key"):
    return server.post("/drain", {"target": target, "api_key": key}, headers=KEY)


@pytest.mark.parametrize("kind", ["pulled", "computed"])
def test_streams_go_on_at_another_server(kind, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    more = ("--kv-transfer-config", json.dumps(config("kv_both"))) if kind == "pulled" else ()
    with serving(*FLAGS, *more) as one, serving(*FLAGS, *more) as two:
        found = begun(one)
        reply = drain(one, two.url).json()
        assert reply["handed_over"] == 3 and reply["finishing_here"] == 0 and reply["same_root"]
        assert one.get("/ready").status_code == 503
        refused = one.post("/v1/completions", body("greedy"), headers=KEY)
        assert refused.status_code == 503 and two.url in refused.text
        check(found, expected)
        hits = two.metric("vllm:external_prefix_cache_hits_total", headers=KEY)
        assert (hits > 3 * 48) == (kind == "pulled")
        assert drain(one, two.url).status_code == 409
        assert num_running(two) == 0


def test_what_the_other_server_drops_goes_on_here(expected):
    with serving(*FLAGS) as one, serving(*FLAGS) as two:
        found = begun(one)
        assert drain(one, two.url).json()["handed_over"] == 3
        two.process.send_signal(signal.SIGKILL)
        two.process.wait()
        check(found, expected)
        two.process.returncode = 0


def test_the_death_of_the_other_servers_core_is_not_seen(expected):
    with serving(*FLAGS) as one, serving(*FLAGS) as two:
        found = begun(one)
        assert drain(one, two.url).json()["handed_over"] == 3
        two.core().kill()
        check(found, expected)


def test_a_client_that_leaves_ends_its_stream_there():
    with serving(*FLAGS) as one, serving(*FLAGS) as two:
        with (
            one.client(headers=KEY) as client,
            client.stream("POST", "/v1/completions", json=body("greedy")) as answer,
        ):
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
            assert drain(one, two.url).json()["handed_over"] == 1
            next(lines)
        end = time.monotonic() + 20
        while num_running(two) and time.monotonic() < end:
            time.sleep(0.1)
        assert num_running(two) == 0


def test_another_root_computes_again_and_another_model_is_refused(expected):
    with serving(*FLAGS) as one, serving(*FLAGS, "--block-size", "32") as two:
        with serving(
            *FLAGS, "--dtype", "bfloat16", "--seed", "3", "--logprobs-mode", "raw_logits"
        ) as three:
            assert drain(one, three.url).status_code == 409
        assert drain(one, two.url, key="wrong").status_code == 502
        assert drain(one, "http://127.0.0.1:9").status_code == 502
        assert drain(one, "ftp://x").status_code == 400
        assert one.post("/drain", {"target": two.url}).status_code == 401
        found = begun(one)
        reply = drain(one, two.url).json()
        assert reply["same_root"] is False and reply["kv"] == "computed again"
        check(found, expected)
