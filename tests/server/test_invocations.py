"""One path for all kinds of requests: the reply of the route that the body is for."""

import json

import pytest

from quire.server.http.json_body import BodyBudget
from tests.server.scripted_app import with_app

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}
COMPLETION = {"prompt": "def add(a, b):", "max_tokens": 3, "temperature": 0}


def told(reply):
    assert reply.status_code == 200, reply.text
    return {name: value for name, value in reply.json().items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_the_reply_is_the_one_of_the_route(server, path, body):
    assert told(server.post("/invocations", body)) == told(server.post(path, body))


def test_a_stream_is_one(server):
    reply = server.post("/invocations", {**CHAT, "stream": True})
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "one of the fields `messages`, `prompt`"),
        ([], 400, "not a JSON object"),
        ({"input": "a"}, 501, "Embeddings API"),
        ({"query": "a", "documents": ["b"]}, 501, "Score"),
        ({"messages": 3}, 400, "messages"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ],
    ids=str,
)
def test_what_is_for_no_route_is_refused(server, body, status, text):
    reply = server.post("/invocations", body)
    assert reply.status_code == status
    assert text in reply.json()["error"]["message"]


def test_a_large_body_is_counted_once(monkeypatch):
    body = json.dumps({"prompt": [5] * 60_000, "max_tokens": 1}).encode()
    budgets, lowest = [], []
    hold = BodyBudget.hold

    def watched(budget, state, num_bytes):
        hold(budget, state, num_bytes)
        budgets.append(budget)
        lowest.append(budget._free)

    monkeypatch.setattr(BodyBudget, "hold", watched)

    async def use(http):
        headers = {"Content-Type": "application/json"}
        reply = await http.post("/invocations", content=body, headers=headers)
        assert reply.status_code == 400, "it is too long for the model"
        assert 0 < budgets[0]._free - min(lowest) <= len(body)

    with_app(use, "hello")


def test_a_compressed_body_is_refused_as_such():
    async def use(http):
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        reply = await http.post("/invocations", content=b"\x1f\x8b", headers=headers)
        assert reply.status_code == 415

    with_app(use, "hello")


def test_a_body_that_is_not_json_is_refused():
    async def use(http):
        headers = {"Content-Type": "application/json"}
        for content in (b"", b"\xff", b"{", b"[" * 100_000):
            reply = await http.post("/invocations", content=content, headers=headers)
            assert reply.status_code == 400
        plain = await http.post("/invocations", content=b'{"prompt": "a"}')
        assert plain.status_code == 400 and "Content-Type" in plain.json()["error"]["message"]

    with_app(use, "hello")
