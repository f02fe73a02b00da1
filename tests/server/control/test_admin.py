"""The routes that control the engine, and those that tell of it."""

import json

import httpx
import pytest

from tests.server.serve_process import serving

HEAD = {"Authorization": "Bearer first-key"}


@pytest.fixture(scope="module")
def admin(guarded):
    with guarded.client(headers=HEAD) as client:
        yield client


def test_they_are_absent_unless_asked_for(server):
    for path in ("/sleep", "/pause", "/abort_requests", "/collective_rpc", "/reset_prefix_cache"):
        assert server.post(path, {}).status_code == 404


def test_pause_and_resume(admin):
    assert admin.post("/pause?mode=keep").json() == {"status": "paused"}
    assert admin.get("/is_paused").json() == {"is_paused": True}
    assert admin.post("/resume").json() == {"status": "resumed"}
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_sleep_and_wake_up(admin):
    assert admin.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    part = admin.post("/wake_up?tags=kv_cache&tags=weights").json()
    assert part["tags"] == ["kv_cache", "weights"]
    assert admin.post("/wake_up").json()["status"] == "awake"
    body = {"prompt": "a", "max_tokens": 1}
    assert admin.post("/v1/completions", json=body).status_code == 200


def test_caches_are_reset(admin):
    assert admin.post("/reset_prefix_cache").json() == {"success": True}
    assert admin.post("/reset_mm_cache").status_code == 200
    assert admin.post("/reset_encoder_cache").status_code == 200


def test_running_requests_are_aborted_by_their_reply_s_id(admin, guarded):
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{guarded.url}/v1/completions", json=body, headers=HEAD, timeout=60
    ) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        name = json.loads(next(lines)[6:])["id"]
        none = admin.post("/abort_requests", json={"request_ids": ["cmpl-other"]}).json()
        assert none == {"status": "aborted", "aborted": 0}
        pieces = iter([b'{"request_ids": ["', name.encode(), b'"]}'])  # a body without a length
        of_json = {"Content-Type": "application/json"}
        done = admin.post("/abort_requests", content=pieces, headers=of_json).json()
        assert done == {"status": "aborted", "aborted": 1}
        last = json.loads(list(lines)[-1][6:])
    assert last["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sleep?level=9", None),
        ("/sleep?nothing=1", None),
        ("/pause?mode=now", None),
        ("/collective_rpc", {"method": "__class__"}),
        ("/collective_rpc", {"method": "sleep", "args": [10**30]}),
        ("/scale_elastic_ep", None),
        ("/start_profile", {"profile_prefix": "../x"}),
    ],
)
def test_what_cannot_be_done_is_refused(admin, path, body):
    reply = admin.post(path, json=body) if body else admin.post(path)
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize(
    ("path", "name"),
    [("/sleep?level=9", "query.level"), ("/pause?mode=now", "query.mode"), ("/sleep?x=1", "query")],
)
def test_a_variable_of_a_query_is_named(admin, path, name):
    assert admin.post(path).json()["error"]["param"] == name


def test_what_cannot_be_done_now_is_a_conflict(admin):
    reply = admin.post("/release_kv_cache_memory")
    assert reply.status_code == 409
    assert "paused" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("before", "after"), [("/pause", "/resume"), ("/sleep", "/wake_up")])
def test_an_engine_that_rests_is_not_scaled(admin, before, after):
    admin.post(before)
    reply = admin.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    admin.post(after)
    assert (reply.status_code, reply.json()["error"]["type"]) == (409, "ConflictError")


def test_a_port_of_its_own():
    flags = ("--enable-admin", "--admin-port", "0", "--api-key", "first-key")
    with serving(*flags) as running:
        own = running.line_with(r"Administration at (\S+)").group(1)
        assert running.post("/pause", {}, headers=HEAD).status_code == 404
        assert httpx.post(f"{own}/pause").status_code == 401
        assert httpx.post(f"{own}/pause", headers=HEAD).json() == {"status": "paused"}
        assert httpx.post(f"{own}/resume", headers=HEAD).status_code == 200
        assert httpx.post(f"{own}/v1/completions", headers=HEAD).status_code == 404
        assert httpx.get(f"{own}/health").status_code == 200


def test_info_and_documents(server):
    info = server.get("/server_info").json()
    theirs = server.get("/server_info?config_format=json").json()["vllm_config"]
    assert theirs["weight_transfer_config"] is None
    assert theirs["parallel_config"]["tensor_parallel_size"] == 1
    assert theirs["model_config"]["dtype"] == f"torch.{info['plan']['dtype']['value']}"
    assert info["plan"]["max_model_len"]["value"] == 4096
    assert info["plan"]["max_model_len"]["reason"]
    document = server.get("/openapi.json").json()
    request = document["components"]["schemas"]["ChatRequest"]
    assert request["additionalProperties"] is False
    assert "messages" in request["required"]
    cancel = document["paths"]["/v1/responses/{id}/cancel"]["post"]
    assert [parameter["name"] for parameter in cancel["parameters"]] == ["id"]
    page = server.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("<html", "")
    assert "/v1/chat/completions" in page.text


def test_metrics_count_requests(server):
    def successes():
        lines = server.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("vllm:request_success_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    before = successes()
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert successes() == before + 1
