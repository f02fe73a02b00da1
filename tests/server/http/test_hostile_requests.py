"""What a request may not do to the server: the rows of the threat table about single requests."""

import asyncio
import json
import re
import time

import httpx
import pytest

from tests.server.scripted_app import with_app

HUGE = 2**63
NUMBERS = [-HUGE, -1, HUGE - 1, HUGE, 10**40, 1e308, -1e308, "", "1", True, None, [], {}]
NUMERIC = [
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "min_tokens", "prompt_logprobs",
    "stream_interval", "truncate_prompt_tokens", "priority", "timeout_s", "thinking_token_budget",
]  # fmt: skip
LISTS = {
    "stop": "a", "stop_token_ids": 5, "bad_words": "a", "allowed_token_ids": 5,
    "logprob_token_ids": 5, "guided_choice": "a",
}  # fmt: skip
ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def rss(server):
    with open(f"/proc/{server.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("path", ROUTES)
def test_t16_no_number_breaks_the_server(client, server, path):
    """Each is honoured or refused by its name, in no time and no memory."""
    before = rss(server)
    for name in NUMERIC:
        for value in NUMBERS:
            reply = client.post(path, json={**ROUTES[path], name: value})
            assert reply.status_code in (200, 400), (name, value, reply.text)
            if reply.status_code == 400:
                error = reply.json()["error"]
                assert name in f"{error['param']} {error['message']}", (name, value, error)
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = json.dumps(ROUTES[path])[:-1] + f', "temperature": {text}}}'
        headers = {"content-type": "application/json"}
        assert client.post(path, content=content, headers=headers).status_code == 400
    assert rss(server) - before < 2**25


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", LISTS)
def test_t16_no_list_is_too_long_to_be_refused(client, path, name):
    body = {**ROUTES[path], name: [LISTS[name]] * 10**6}
    if name == "logprob_token_ids":
        body["logprobs"] = path.endswith("chat/completions") or 1
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert name.removeprefix("guided_") in reply.json()["error"]["message"]


def test_t16_biases_lie_in_the_vocabulary(client):
    for key in ("-1", "999999", "x", "1.5", str(HUGE)):
        reply = client.post("/v1/completions", json={"prompt": "a", "logit_bias": {key: 1}})
        assert reply.status_code == 400, key


@pytest.mark.parametrize("fields", [
    {"logprobs": 10**9}, {"logprobs": -2}, {"prompt_logprobs": 10**9}, {"prompt_logprobs": -2},
])  # fmt: skip
def test_t17_logprobs_have_a_bound(client, fields):
    reply = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in fields


@pytest.mark.parametrize("name", ["prompt_embeds", "mm_processor_kwargs", "ec_transfer_params",
                                  "lora_request", "data_parallel_rank", "__class__"])  # fmt: skip
def test_t18_t27_inner_fields_are_not_the_client_s(client, name):
    for path, body in ROUTES.items():
        reply = client.post(path, json={**body, name: {"tp_size": 10**12}})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == name


def test_t19_t20_no_address_is_fetched(client):
    """Media parts are refused by name, so that nothing is looked up for a client."""
    for url in ("http://127.0.0.1:1/x", "file:///etc/passwd", "data:image/png;base64,AAAA"):
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert "image_url" in reply.json()["error"]["message"]


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "", "x" * 129])
def test_t26_salts_have_harmless_characters(client, salt):
    reply = client.post("/v1/completions", json={"prompt": "a", "cache_salt": salt})
    assert reply.status_code == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": [5] * 4095, "max_tokens": 1}, 200),
        ({"prompt": [5] * 4096}, 400),
        ({"prompt": [5] * 5000}, 400),
        ({"prompt": [0, 0, 0]}, 200),
        ({"prompt": ""}, 200),
        ({"prompt": "", "add_special_tokens": False}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [[]]}, 400),
        ({"prompt": "a", "max_tokens": 4096}, 200),
        ({"prompt": "a", "max_tokens": 4097}, 200),
        ({"prompt": "a", "stop": ""}, 400),
        ({"prompt": "a", "stop": []}, 200),
        ({"prompt": "\U0001f642\u0000\u202e"}, 200),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, 400),
        ({"prompt": [5] * 6000, "truncate_prompt_tokens": -1, "max_tokens": 1}, 200),
    ],
)
def test_t28_the_edges_of_a_request(client, fields, status):
    given = {"max_tokens": 2, "ignore_eos": False, **fields}
    if given["max_tokens"] == 4096:
        given["stop_token_ids"] = list(range(1, 1000))
    reply = client.post("/v1/completions", json=given)
    assert reply.status_code == status, reply.text


def test_t2_no_encoding_but_json(client):
    for kind in ("application/x-pickle", "application/octet-stream", "multipart/form-data", ""):
        reply = client.post(
            "/v1/completions", content=b"\x80\x04N.", headers={"content-type": kind}
        )
        assert reply.status_code == 400


def test_t12_a_request_s_template_is_refused_where_nobody_trusts_it(client):
    for fields in (
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{{ cycler.__init__ }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
    ):
        body = {**ROUTES["/v1/chat/completions"], **fields}
        assert client.post("/v1/chat/completions", json=body).status_code == 400


def test_t29_what_is_too_much_is_refused_at_once():
    """Beyond the queue's bound: 503 with a hint, before any work; and the server goes on."""

    async def use(http):
        body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}

        async def send():
            start = time.monotonic()
            reply = await http.post("/v1/completions", json=body)
            return reply, time.monotonic() - start

        replies = await asyncio.gather(*(send() for _ in range(100)))
        late = await http.post("/v1/completions", json=body)
        return [reply for reply, _ in replies], late

    replies, late = with_app(use, "word " * 60, queue=(10, 10**6))
    refused = [reply for reply in replies if reply.status_code == 503]
    assert len(refused) == 90
    assert all(reply.json()["error"]["code"] == 503 for reply in refused)
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert [reply.status_code for reply in replies].count(200) == 10
    assert late.status_code == 200


def test_a_client_that_leaves_ends_its_request(server, client):
    """At its first event, in the middle, before the first: nothing runs on for nobody."""
    before, at_length = num_ended(client, "abort"), num_ended(client, "length")
    body = {"prompt": "a", "max_tokens": 3900, "ignore_eos": True}
    for num_events in (0, 1, 7):
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
        ) as reply:
            lines = reply.iter_lines()
            for _ in range(num_events):
                next(lines)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 60
    while client.get("/load").json()["server_load"] or num_ended(client, "abort") < before + 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert num_ended(client, "length") == at_length


def num_ended(client, reason):
    """How many requests have ended for a reason."""
    [value] = re.findall(
        rf'^vllm:request_success_total\{{[^}}]*finished_reason="{reason}"[^}}]*\}} (\S+)$',
        client.get("/metrics").text,
        re.MULTILINE,
    )
    return float(value)


def test_t15_other_streams_are_right_while_hostile_ones_come(server):
    """T15: what is wrong with one request is nobody else's trouble."""
    good = {"prompt": "def add(a, b):", "max_tokens": 40, "temperature": 0}
    bad = [
        {"prompt": [10**6]}, {"prompt": "a", "logit_bias": {"x": 1}},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "nothing"}}}},
        {"prompt": "a", "bad_words": ["a"] * 1000},
    ]  # fmt: skip

    async def both():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            bodies = [good, *bad, good, *bad, good]
            return await asyncio.gather(*(http.post("/v1/completions", json=b) for b in bodies))

    alone = server.post("/v1/completions", good).json()["choices"][0]["text"]
    replies = asyncio.run(both())
    texts = [r.json()["choices"][0]["text"] for r in replies if r.status_code == 200]
    assert texts[:3] == [alone] * 3
    assert {reply.status_code for reply in replies} <= {200, 400}


CHAT = "/v1/chat/completions"
TALK = {"model": "quire-embedded", "max_tokens": 1}


def _said(**part):
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": _said(type=[], text="a")}, "messages[0].content[0].type"),
        (CHAT, {"messages": _said(type={}, text="a")}, "messages[0].content[0].type"),
        ("/tokenize", {"messages": _said(type={}, text="a")}, "messages[0].content[0].type"),
        ("/v1/responses", {"input": _said(type=[], text="a")}, "input[0].content[0].type"),
        ("/v1/responses", {"input": [{"role": "user", "content": [1]}]}, "input[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ("/v1/responses", {"input": [{"type": []}]}, "input[0].type"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content"),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": "a"}]}, "input[0].summary"),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": [1]}]}, "input[0].summary"),
        ("/v1/responses/input_tokens", {"input": _said(type=[])}, "input[0].content[0].type"),
        ("/v1/conversations", {"items": _said(type={})}, "items[0].content[0].type"),
        ("/v1/conversations", {"items": [{"type": "reasoning", "content": 1}]}, "items[0].content"),
        ("/v1/conversations",
         {"items": [{"type": "function_call_output", "call_id": "c", "output": [{"type": []}]}]},
         "items[0].output[0].type"),
        ("/v1/messages",
         {**TALK, "messages": _said(type="tool_result", tool_use_id="t", content=1)},
         "messages[0].content[0].content"),
        ("/v1/messages", {**TALK, "messages": _said(type=[])}, "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_a_wrong_type_within_a_message_is_its_senders_error(client, path, body, param):
    reply = client.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["message"].startswith(f"{param}=") and error.get("param", param) == param


@pytest.mark.parametrize("path", [*ROUTES, "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "encodings", [["gzip"], ["identity, br"], ["identity", "deflate"], ["GZIP"], ["x" * 10_000]]
)
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(client, path, encodings):
    """It would pass for JSON that is not valid, or for another body than the client sent."""
    headers = [("content-type", "application/json")]
    headers += [("content-encoding", each) for each in encodings]
    reply = client.post(path, content=b"\x1f\x8b\x08", headers=headers)
    assert reply.status_code == 415, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(f"Content-Encoding: {', '.join(encodings)[:80]}"[:60])
    assert len(error["message"]) < 300 and reply.headers["accept-encoding"] == "identity"


def test_a_body_as_it_is_may_say_so(client):
    for encoding in ("identity", "", "Identity,identity"):
        headers = {"content-encoding": encoding}
        reply = client.post("/v1/completions", json=ROUTES["/v1/completions"], headers=headers)
        assert reply.status_code == 200, reply.text
