"""Models, tokens, health, ids, errors: raw requests to a real server."""

import json
import time

import psutil
import pytest

from quire import __version__
from tests.server.serve_process import serving


def test_models(server):
    with server.openai() as client:
        [card] = client.models.list()
        assert card.id == "quire-embedded"
        assert client.models.retrieve(card.id).id == card.id
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
    assert server.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_a_living_server_says_so(server, path):
    reply = server.get(path)
    assert (reply.status_code, reply.content) == (200, b"")


def test_version_and_load(server):
    assert server.get("/version").json() == {"version": __version__}
    assert server.get("/load").json() == {"server_load": 0}


def test_tokens_there_and_back(server):
    text = "def f(x):\n    return 'ä→🙂'"
    asked = {"prompt": text, "return_token_strs": True, "add_special_tokens": False}
    found = server.post("/tokenize", asked).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_a_reply_reports_the_load_to_a_balancer_that_asks(server):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
    ):
        given = {"endpoint-load-metrics-format": "JSON"}
        kind, _, report = (
            server.post(path, body, headers=given).headers["endpoint-load-metrics"].partition(" ")
        )
        values = json.loads(report)["named_metrics"]
        assert kind == "JSON" and values.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
        assert 0 <= values["kv_cache_usage_perc"] <= 1 and values["num_requests_waiting"] == 0
        given = {"endpoint-load-metrics-format": "text"}
        said = server.post(path, body, headers=given).headers["endpoint-load-metrics"]
        assert said.startswith("TEXT named_metrics.kv_cache_usage_perc=0.")
        assert said.endswith(", named_metrics.num_requests_waiting=0.0")
        assert "endpoint-load-metrics" not in server.post(path, body).headers


def test_a_request_id_comes_back(server):
    given = server.get("/version", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = {server.get("/version").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    odd = server.get("/version", headers={"X-Request-Id": "a" * 1000})
    assert len(odd.headers["x-request-id"]) == 32


def shape(reply):
    """Every error has this one shape, whoever made it."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == reply.status_code
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    return reply.status_code, error["type"]


@pytest.mark.parametrize(
    ("method", "path", "content", "kind", "right"),
    [
        ("GET", "/nope", None, None, (404, "NotFoundError")),
        ("GET", "/v1/models//", None, None, (404, "NotFoundError")),
        ("GET", "/V1/models", None, None, (404, "NotFoundError")),
        ("GET", "/v1//models", None, None, (404, "NotFoundError")),
        ("GET", "/v1/completions", None, None, (405, "MethodNotAllowedError")),
        ("DELETE", "/health", None, None, (405, "MethodNotAllowedError")),
        ("POST", "/v1/completions", b"{}", "text/plain", (400, "BadRequestError")),
        ("POST", "/v1/completions", b"{}", "application/json", (400, "BadRequestError")),
        ("POST", "/v1/completions", b"{", "application/json", (400, "BadRequestError")),
        ("POST", "/v1/completions", b"\xff\xfe", "application/json", (400, "BadRequestError")),
        ("POST", "/v1/completions", b'{"prompt": 7}', "application/json", (400, "BadRequestError")),
        ("POST", "/v1/completions", b"[" * 100_000, "application/json", (400, "BadRequestError")),
        ("POST", "/tokenize", b'{"prompt": "\\ud800"}', "application/json",
         (400, "BadRequestError")),
    ],
)  # fmt: skip
def test_every_refusal_has_one_shape(server, method, path, content, kind, right):
    headers = {} if kind is None else {"content-type": kind}
    with server.client() as client:
        reply = client.request(method, path, content=content, headers=headers)
    assert shape(reply) == right
    if reply.status_code == 405:
        assert reply.headers["allow"]


def test_a_charset_is_fine(server):
    headers = {"content-type": "application/json; charset=utf-8"}
    with server.client() as client:
        reply = client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert reply.status_code == 200


def test_harmless_fields_are_accepted(server):
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
                "safety_identifier": "s", "prompt_cache_key": "k"}  # fmt: skip
    reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **harmless})
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"].split(", ") == list(harmless)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v1/audio/transcriptions"])
def test_what_other_models_serve_is_refused_as_such(server, path):
    reply = server.post(path, {"model": "", "input": "a"})
    assert shape(reply) == (501, "NotImplementedError")
    assert "generates text" in reply.json()["error"]["message"]


def test_engines_take_no_instructions_after_a_failure(server):
    for reply in (
        server.post("/fault_tolerance/apply", {"instruction": "retry", "params": {}}),
        server.get("/fault_tolerance/status"),
    ):
        assert shape(reply) == (501, "NotImplementedError")
        assert "started anew" in reply.json()["error"]["message"]


def test_a_server_whose_engine_is_dead_stops_with_1():
    with serving("--max-core-restarts", "0") as server:
        for child in psutil.Process(server.process.pid).children(recursive=True):
            child.kill()
        assert server.wait() == 1, server.log


def running(server):
    [line] = [line for line in server.get("/metrics").text.splitlines()
              if line.startswith("vllm:num_requests_running{")]  # fmt: skip
    return float(line.rpartition(" ")[2])


def wait_until_running(server, number):
    deadline = time.monotonic() + 60
    while running(server) != number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_gauges_fall_when_the_last_stream_is_cancelled():
    """Without waiting for the next request, whose first step would bring new statistics."""
    with serving() as server:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with server.client().stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # whose end would end the stream
            next(lines)
            wait_until_running(server, 1)
        wait_until_running(server, 0)


HELLO = [{"role": "user", "content": "hello"}]


def test_a_conversation_can_be_tokenized(server):
    shown = server.post("/v1/chat/completions/render", {"messages": HELLO}).json()
    found = server.post("/tokenize", {"messages": HELLO}).json()
    assert found["tokens"] == shown["token_ids"]
    closed = {"messages": HELLO, "add_generation_prompt": False}
    assert server.post("/tokenize", closed).json()["count"] < found["count"]
    long = [{"role": "user", "content": "a b " * 4096}]
    assert server.post("/tokenize", {"messages": long}).json()["count"] > found["max_model_len"]
    for wrong in ({}, {"prompt": "a", "messages": HELLO}, {"prompt": "a", "tools": []}):
        assert server.post("/tokenize", wrong).status_code == 400


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/models", "/messages"])
def test_routes_are_served_without_v1(server, path):
    bodies = {"/chat/completions": {"messages": HELLO, "max_tokens": 1, "seed": 1},
              "/completions": {"prompt": "a", "max_tokens": 1, "temperature": 0},
              "/messages": {"messages": HELLO, "max_tokens": 1}}  # fmt: skip
    if path == "/models":
        assert server.get(path).json() == server.get(f"/v1{path}").json()
        return
    assert server.post(path, bodies[path]).status_code == 200
    assert server.post(path, {}).status_code == 400


def test_an_unknown_route_of_messages_is_refused_as_its_clients_expect(server):
    reply = server.post("/v1/messages/no_such", {})
    assert (reply.status_code, reply.json()["type"]) == (404, "error")
    assert reply.json()["error"]["type"] == "not_found_error"


def test_the_tokenizer_is_described_if_it_may_be(server):
    assert server.get("/tokenizer_info").status_code == 404
    with serving("--enable-tokenizer-info-endpoint") as other:
        info = other.get("/tokenizer_info").json()
    assert info["eos_token"] and "messages" in info["chat_template"]


def test_a_text_that_begins_with_bos_gets_no_second_one(server):
    def ids(text, **fields):
        return server.post("/tokenize", {"prompt": text, **fields}).json()["tokens"]

    right = ids("def f")
    assert ids("<|begin|>def f") == right
    assert ids("<|begin|><|begin|>def f") == [right[0], right[0], *right]
    assert ids("<|begin|>def f", add_special_tokens=False) == right
    sent = {"prompt": "<|begin|>def f", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    [choice] = server.post("/v1/completions", sent).json()["choices"]
    assert choice["prompt_token_ids"] == right
